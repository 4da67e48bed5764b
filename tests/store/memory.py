"""The Store contract in a dict: the fast store of the fleet's tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from diffurefill.store.base import (
    MAIN,
    Change,
    Conflict,
    Corrupt,
    NotFound,
    Ref,
    Version,
    check_lane,
    check_path,
    new_nonce,
    sha256_file,
)


class MemoryStore:
    """The Store contract in a dict; passes the same contract suite as the real ones."""

    def __init__(self) -> None:
        self.uri = "memory:"
        self.blobs: dict[str, bytes] = {}
        self.versions: dict[str, list[Version]] = {}

    def selftest(self) -> None:
        pass

    def check_access(self) -> None:
        pass

    def lanes(self) -> list[str]:
        return sorted(self.versions)

    def head(self, lane: str = MAIN) -> Version | None:
        check_lane(lane)
        return self.versions[lane][-1] if lane in self.versions else None

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        heads = {lane: self.head(lane) for lane in lanes}
        return {lane: head.id if head else None for lane, head in heads.items()}

    def stage(self, source: Path) -> Ref:
        ref = sha256_file(source)
        self.blobs[ref.sha256] = source.read_bytes()
        return ref

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
    ) -> Version:
        head = self.head(lane)
        if (head and (head.id, head.nonce)) != (expect and (expect.id, expect.nonce)):
            raise Conflict(f"lane {lane} is at {head.id if head else None}")
        for path in changes:
            check_path(path)
        files = dict(head.files) if head else {}
        for path, change in changes.items():
            if change is None:
                files.pop(path, None)
                continue
            if isinstance(change, bytes):
                digest = hashlib.sha256(change).hexdigest()
                self.blobs[digest] = change
                change = Ref(digest, len(change))
            if change.sha256 not in self.blobs:
                raise NotFound(f"{path} was never staged")
            files[path] = change
        version = Version(lane, str(int(head.id) + 1 if head else 1), nonce or new_nonce(), files)
        self.versions.setdefault(lane, []).append(version)
        return version

    def fetch(self, ref: Ref, dest: Path) -> Path:
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(self.read(ref))
        return dest

    def read(self, ref: Ref) -> bytes:
        if ref.sha256 not in self.blobs:
            raise NotFound(ref.sha256)
        content = self.blobs[ref.sha256]
        if hashlib.sha256(content).hexdigest() != ref.sha256:
            raise Corrupt(f"blob {ref.sha256}")
        return content

    def lookup(self, lane: str, nonce: str) -> Version | None:
        return next((v for v in self.versions.get(lane, []) if v.nonce == nonce), None)

    def history(self, lane: str) -> Iterator[Version]:
        yield from list(self.versions.get(lane, []))

    def compact(self, lane: str, expect: Version) -> Version:
        """No age guard: the actors of a test must not rely on one."""
        head = self.head(lane)
        if head != expect:
            raise Conflict(f"lane {lane} is at {head.id if head else None}")
        needed = {r for each in self.lanes() for r in self.versions[each][-1].files.values()}
        for version in self.versions[lane]:
            for ref in set(version.files.values()) - needed:
                self.blobs.pop(ref.sha256, None)
        return expect
