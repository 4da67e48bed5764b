"""A run in a model repository of the hub: a lane is a branch, a version is a commit.

    version.json   on every branch: {lane, number, nonce, previous, files, sha256}
    <path>         the lane's files under their own names, so that the model page shows them

A commit with `parent_commit` is the compare-and-swap. The manifest rides in the same commit; its
nonce makes every commit a change, because the client reports success for an unchanged one without
asking the hub. A branch belongs to its lane once its manifest names that lane: until then it
holds what it was started from, and the lane does not exist.

Downloads are plain requests, hashed here and resumed where a connection broke: they have time
limits and use no cache, which Xet's own do not offer. Uploads go through Xet.
Source: spec hub.md A and fleet.md 5.0-5.2.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils import FORBIDDEN_FOLDERS

from diffurefill.config import UserError
from diffurefill.store.base import (
    MAIN,
    Busy,
    Change,
    Conflict,
    Corrupt,
    NotFound,
    Ref,
    StoreError,
    Version,
    check_lane,
    check_path,
    is_lane,
    new_nonce,
    sha256_file,
)
from diffurefill.store.durable import copy_errors, removed_at_exit, replace_durably
from diffurefill.store.hub_client import PASSING_PAUSE
from diffurefill.store.hub_files import (
    MANIFEST,
    REGULAR_BYTES,
    Known,
    Operation,
    by_digest,
    encode,
    is_regular,
    regular,
    removal,
)
from diffurefill.store.hub_repo import HubRepo
from diffurefill.store.hub_versions import HubVersions
from diffurefill.store.selftest import prove_conditional_writes

COMMITS_PER_HOUR = 120
SELFTEST_LANE = "selftest"
LOOKUP_COMMITS = 1_000
"""Newest commits of a lane that a lookup goes through; a doubt is about one of the last few."""
HARMLESS = frozenset((".gitattributes", "README.md"))
"""What the hub puts into a new repository, and a person who makes it on its pages."""
EMPTY = Ref(hashlib.sha256(b"").hexdigest(), 0)


class HubStore:
    """The Store contract (base.py) on `hf://user/repo`."""

    def __init__(
        self,
        uri: str,
        *,
        create: bool,
        commits_per_hour: int = COMMITS_PER_HOUR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the run; `create` makes a private repository where there is none.

        `clock` gives monotonic seconds, for the commit limit. Raises UserError, Denied or Busy.
        """
        self.uri = uri
        self._repo = HubRepo(uri, commits_per_hour=commits_per_hour, clock=clock)
        self._versions = HubVersions(self._repo)
        self._staged: dict[Ref, Path] = {}
        self._repo.open(create)
        if create:
            self._require_room_for_a_run()

    def selftest(self) -> None:
        lane = f"{SELFTEST_LANE}-{new_nonce()[:8]}"
        try:
            # Few commits: the hub counts them by the hour.
            prove_conditional_writes(self, lane, num_writers=2, updates=1)
        finally:
            with contextlib.suppress(StoreError):
                self._repo.delete_branch(lane)
            self._versions.forget(lane=lane)

    def check_access(self) -> None:
        self._repo.check_access()

    def lanes(self) -> list[str]:
        ours = [n for n in self._versions.lanes() if is_lane(n) and not n.startswith(SELFTEST_LANE)]
        return sorted(lane for lane, known in self._versions.heads(ours).items() if known)

    def head(self, lane: str = MAIN) -> Version | None:
        known = self._versions.heads([lane])[lane]
        return known.version if known else None

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        heads = self._versions.heads(lanes)
        return {lane: known.version.id if known else None for lane, known in heads.items()}

    def stage(self, source: Path) -> Ref:
        # LFS takes no empty files; they go into the commit itself.
        ref = EMPTY if source.stat().st_size == 0 else self._repo.upload(source)
        self._staged[ref] = source
        return ref

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
    ) -> Version:
        check_lane(lane)
        for path in changes:
            _check_path(path)
        parent, base, leftover = self._parent(lane, expect, changes)
        files = dict(base.version.files) if base else {}
        gone = {path for path, change in changes.items() if change is None} & files.keys()
        additions = {path: self._addition(path, c) for path, c in changes.items() if c is not None}
        for path in gone:
            del files[path]
        for path, operation in additions.items():
            info = operation.upload_info
            files[path] = Ref(info.sha256.hex(), info.size)
        version = Version(lane, "", nonce or new_nonce(), files)
        draft = Known(version, base.number + 1 if base else 1, base.version.id if base else None)
        operations: list[Operation] = [removal(p) for p in sorted(gone | leftover - files.keys())]
        operations += [*additions.values(), regular(MANIFEST, encode(draft))]
        title = _title(lane, version.nonce)
        commit = self._repo.commit(lane, operations, parent=parent, title=title)
        made = Known(Version(lane, commit, version.nonce, files), draft.number, draft.previous)
        self._versions.advance(made)
        return made.version

    def fetch(self, ref: Ref, dest: Path) -> Path:
        part = dest.with_name(f".{dest.name}.{new_nonce()}.part")
        with copy_errors(dest), removed_at_exit(part):
            dest.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as f:
                self._copy(ref, f)
                f.flush()
                os.fsync(f.fileno())
            replace_durably(part, dest)
        return dest

    def read(self, ref: Ref) -> bytes:
        buffer = io.BytesIO()
        self._copy(ref, buffer)
        return buffer.getvalue()

    def lookup(self, lane: str, nonce: str) -> Version | None:
        head = self.head(lane)
        if head is not None and head.nonce == nonce:
            return head
        for commit in itertools.islice(self._repo.commits(lane), LOOKUP_COMMITS):
            if commit["title"] != _title(lane, nonce):
                continue
            known = self._versions.at(commit["id"])
            if known is not None and known.version.nonce == nonce:
                self._versions.advance(known)
                return known.version
        return None

    def history(self, lane: str) -> Iterator[Version]:
        check_lane(lane)
        last: Version | None = None
        for commit in reversed(list(self._repo.commits(lane))):
            try:
                known = self._versions.at(commit["id"])
            except NotFound:  # squashed away meanwhile
                continue
            if known is None or known.version.lane != lane:
                continue
            # A commit that a person makes on the model page repeats the manifest before it.
            if last is not None and last.nonce != known.version.nonce:
                yield last
            last = known.version
        if last is not None:
            yield last

    def compact(self, lane: str, expect: Version) -> Version:
        """Squashes the branch, then proves that nothing but its history changed.

        The hub frees storage by itself, hours later; nothing is deleted from it here.
        """
        head = self.head(lane)
        if head is None or (head.id, head.nonce) != (expect.id, expect.nonce):
            raise Conflict(f"lane {lane} is not at {expect.id} any more")
        before = self._repo.tree(expect.id)
        self._repo.squash(lane, _title(lane, expect.nonce))
        commit = self._repo.branches().get(lane)
        if commit is None or commit == expect.id:
            raise Busy(f"{self.uri}: the hub has not squashed {lane} yet", PASSING_PAUSE)
        known = self._versions.at(commit)
        if known is None or known.version.nonce != expect.nonce:
            raise Conflict(f"lane {lane} moved on while it was squashed")
        if self._repo.tree(commit) != before:
            raise Corrupt(f"{self.uri}: squashing {lane} changed its files; restore them")
        return self._versions.advance(known).version

    # --- publishing ---

    def _parent(
        self, lane: str, expect: Version | None, paths: Collection[str]
    ) -> tuple[str, Known | None, set[str]]:
        """(parent commit, the version it is, files of another lane that are to go)."""
        if expect is not None:
            known = None
            if re.fullmatch(r"[0-9a-f]{40}", expect.id):
                with contextlib.suppress(NotFound):
                    known = self._versions.at(expect.id)
            if known is None or (known.version.lane, known.version.nonce) != (lane, expect.nonce):
                raise Conflict(f"lane {lane} is not at {expect.id} any more")
            return expect.id, known, set()
        # Of several makers of a branch, the one whose commit comes first has made the lane.
        found = self._repo.branches().get(lane)
        commit = found or self._repo.start_branch(lane)
        if self._versions.newest(lane, commit) is not None:
            raise Conflict(f"lane {lane} exists")
        foreign = self._versions.at(commit)
        if foreign is not None:
            return commit, None, set(foreign.version.files)
        # A lane that is new, or was begun a moment ago, holds a copy of the first commit at most.
        if found and (lane == MAIN or found != self._repo.start):
            self._require_unused(lane, found, paths)
        return commit, None, set()

    def _require_room_for_a_run(self) -> None:
        """Told to the maker of a run at once, not when its first version is published."""
        commit = self._repo.branches().get(MAIN)
        if commit is not None and self._versions.at(commit) is None:
            self._require_unused(MAIN, commit, ())

    def _require_unused(self, branch: str, commit: str, paths: Collection[str]) -> None:
        """UserError where a branch without a manifest holds what somebody else has put there."""
        held = self._repo.tree(commit).keys()
        theirs = sorted((held - HARMLESS) | (held & set(paths)))
        if theirs:
            raise UserError(
                f"{self.uri} holds files that are of no run, {theirs[0]} on branch {branch} among "
                "them, and they are not written over: give the run a repository of its own"
            )

    def _addition(self, path: str, change: bytes | Ref) -> CommitOperationAdd:
        """The operation that puts `change` at `path`; its bytes are at the hub, or are small."""
        if isinstance(change, bytes):
            if is_regular(change):
                return regular(path, change)
            return by_digest(path, self._repo.upload(change))
        if change == EMPTY:
            return regular(path, b"")
        if change not in self._staged and change.size <= REGULAR_BYTES:
            # Only the hub knows whether a short file lies in git; if so its bytes go along.
            with contextlib.suppress(NotFound):
                content = self.read(change)
                if is_regular(content):
                    return regular(path, content)
        return by_digest(path, change)

    # --- bytes ---

    def _copy(self, ref: Ref, f: BinaryIO) -> None:
        """Write the verified bytes of `ref` to `f`."""
        if ref == EMPTY:
            return
        if self._copy_from(itertools.islice(self._versions.places(ref), 1), ref, f):
            return
        if self._copy_staged(ref, f):
            return
        self.lanes()  # what the lanes hold by now
        if not self._copy_from(self._versions.places(ref), ref, f):
            raise NotFound(f"{self.uri}: no file with sha256 {ref.sha256}")

    def _copy_from(self, places: Iterator[tuple[str, str]], ref: Ref, f: BinaryIO) -> bool:
        """Whether one of the (commit, path) had it. Raises Corrupt at the first that lies."""
        for commit, path in places:
            try:
                if self._copy_verified(commit, path, ref, f):
                    return True
            except NotFound:  # squashed away; another version may have it
                self._versions.forget(commit=commit)
            else:
                raise Corrupt(f"{self.uri}: {path} at {commit} is not what was published, twice")
        return False

    def _copy_verified(self, commit: str, path: str, ref: Ref, f: BinaryIO) -> bool:
        for _attempt in range(2):
            f.seek(0)
            f.truncate()
            if self._repo.download(commit, path, f, ref.size) == ref:
                return True
        return False

    def _copy_staged(self, ref: Ref, f: BinaryIO) -> bool:
        """The hub gives nobody what no commit names yet, but its stager still has the file."""
        source = self._staged.get(ref)
        if source is None or not source.exists() or sha256_file(source) != ref:
            return False
        with open(source, "rb") as staged:
            shutil.copyfileobj(staged, f)
        return True


def require_token(uri: str) -> None:
    """Raises Denied when there is no token, or one that may write nothing."""
    HubRepo(uri, commits_per_hour=COMMITS_PER_HOUR, clock=time.monotonic).check_token()


def _check_path(path: str) -> None:
    check_path(path)
    parts = path.split("/")
    if path == MANIFEST or parts[0] == ".gitattributes" or set(parts) & set(FORBIDDEN_FOLDERS):
        raise UserError(f"path {path!r} is taken: git or the hub's client keeps it")


def _title(lane: str, nonce: str) -> str:
    """Commit title: a lookup finds the nonce without opening every manifest."""
    return f"{lane} {nonce}"
