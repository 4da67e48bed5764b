"""The hub itself, in memory and without faults: lanes, versions, blobs, a commit quota.

It passes the Store contract suite, so it stands for any backend. What a process sees of it goes
through its own `SimStore` (connection.py), where answers are lost, late, stale or damaged.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from diffurefill.store.base import (
    MAIN,
    Busy,
    Change,
    Conflict,
    Corrupt,
    NotFound,
    Ref,
    Version,
    check_lane,
    check_path,
    new_nonce,
)

HOUR = 3600.0

Landed = Callable[[Version, str], None]
"""Told of every new head and of who wrote it."""


class SimHub:
    """The Store contract in dictionaries. `clock` counts the quota's hours, in seconds."""

    def __init__(
        self, clock: Callable[[], float] = lambda: 0.0, commits_per_hour: int | None = None
    ) -> None:
        self.uri = "memory:"
        self.clock, self.commits_per_hour = clock, commits_per_hour
        self.lanes_kept: dict[str, list[Version]] = {}
        self.blobs: dict[str, bytes] = {}
        self.damaged: dict[str, bytes] = {}
        """What the hub answers instead of a blob that was damaged on its way in."""
        self.dropped: dict[str, list[Version]] = {}
        """What compaction took away; a head that lags may still name it."""
        self.published_at: dict[tuple[str, str], float] = {}
        """By lane and id, on `clock`."""
        self.num_published: dict[str, int] = {}
        """Ids given out per lane; never used again, compacted or not."""
        self.fetched_by: dict[str, set[str]] = {}
        """Digests of the blobs that each process downloaded."""
        self.seen_by: dict[str, dict[str, tuple[str, float]]] = {}
        """By process and lane: the head it was last told, and since when."""
        self.lag_seconds = 0.0
        """Versions younger than this may be missing from an answer."""
        self.commit_times: deque[float] = deque()
        self.num_refused = self.num_squashed = 0
        self.on_publish: list[Landed] = []
        self.on_compact: list[Callable[[Version, Version], None]] = []
        """Told of the head before and after a lane's history was dropped."""

    def selftest(self) -> None:
        pass

    def check_access(self) -> None:
        pass

    # --- versions --------------------------------------------------------------------------------

    def lanes(self) -> list[str]:
        return sorted(self.lanes_kept)

    def head(self, lane: str = MAIN) -> Version | None:
        check_lane(lane)
        versions = self.lanes_kept.get(lane)
        return versions[-1] if versions else None

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        heads = {lane: self.head(lane) for lane in lanes}
        return {lane: head.id if head else None for lane, head in heads.items()}

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
        writer: str = "",
    ) -> Version:
        """As the contract says; `writer` is passed on to `on_publish`."""
        for path in changes:
            check_path(path)
        head = self._require_head(lane, expect)
        files = dict(head.files) if head else {}
        for path, change in changes.items():
            if change is None:
                files.pop(path, None)
                continue
            ref = self.put(change) if isinstance(change, bytes) else change
            if ref.sha256 not in self.blobs:
                raise NotFound(f"{path} was never staged")
            files[path] = ref
        self._count_commit()
        version = Version(lane, self._new_id(lane), nonce or new_nonce(), files)
        self.lanes_kept.setdefault(lane, []).append(version)
        self.published_at[lane, version.id] = self.clock()
        for told in self.on_publish:
            told(version, writer)
        return version

    def lookup(self, lane: str, nonce: str) -> Version | None:
        versions = self.lanes_kept.get(lane, [])
        return next((v for v in reversed(versions) if v.nonce == nonce), None)

    def history(self, lane: str) -> Iterator[Version]:
        yield from list(self.lanes_kept.get(lane, []))

    def compact(self, lane: str, expect: Version) -> Version:
        """Squash: the head under a new id, every older version gone, and the blobs only they named.

        Blobs that no version ever named are staged for a publish to come, and stay.
        """
        head = self._require_head(lane, expect)
        if head is None:
            raise Conflict(f"lane {lane} has no version")
        dropped = {ref.sha256 for v in self.lanes_kept[lane] for ref in v.files.values()}
        squashed = Version(lane, self._new_id(lane), head.nonce, head.files)
        self.published_at[lane, squashed.id] = self.clock()
        self.dropped.setdefault(lane, []).extend(self.lanes_kept[lane])
        self.lanes_kept[lane] = [squashed]
        self.num_squashed += 1
        named = {
            ref.sha256 for versions in self.lanes_kept.values() for v in versions[-1:]
            for ref in v.files.values()
        }  # fmt: skip
        for sha256 in dropped - named:
            self.blobs.pop(sha256, None)
        for told in self.on_compact:
            told(head, squashed)
        return squashed

    def _require_head(self, lane: str, expect: Version | None) -> Version | None:
        head = self.head(lane)
        if (head and (head.id, head.nonce)) != (expect and (expect.id, expect.nonce)):
            raise Conflict(f"lane {lane} is at {head.id if head else None}")
        return head

    def _new_id(self, lane: str) -> str:
        number = self.num_published.get(lane, 0) + 1
        self.num_published[lane] = number
        return str(number)

    def _count_commit(self) -> None:
        """The hub's own hourly quota: 429 for the commit that would exceed it."""
        now, times = self.clock(), self.commit_times
        while times and times[0] <= now - HOUR:
            times.popleft()
        if self.commits_per_hour is not None and len(times) >= self.commits_per_hour:
            self.num_refused += 1
            raise Busy("429: too many commits this hour", times[0] + HOUR - now)
        times.append(now)

    # --- bytes -----------------------------------------------------------------------------------

    def put(self, content: bytes) -> Ref:
        sha256 = hashlib.sha256(content).hexdigest()
        self.blobs[sha256] = content
        self.damaged.pop(sha256, None)  # written again, as the folder does
        return Ref(sha256, len(content))

    def stage(self, source: Path) -> Ref:
        return self.put(source.read_bytes())

    def answer(self, ref: Ref) -> bytes:
        """What one GET brings, unverified."""
        if ref.sha256 not in self.blobs:
            raise NotFound(f"no blob {ref.sha256}")
        return self.damaged.get(ref.sha256, self.blobs[ref.sha256])

    def read(self, ref: Ref) -> bytes:
        content = self.answer(ref)
        require_digest(content, ref)
        return content

    def fetch(self, ref: Ref, dest: Path) -> Path:
        content = self.read(ref)
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(content)
        return dest


def require_digest(content: bytes, ref: Ref) -> None:
    """Corrupt unless these are the bytes that `ref` names."""
    if len(content) != ref.size or hashlib.sha256(content).hexdigest() != ref.sha256:
        raise Corrupt(f"blob {ref.sha256}: its bytes are not what its name says")
