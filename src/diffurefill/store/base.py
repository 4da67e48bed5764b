"""The Store contract: lanes of numbered versions, each a small atomic set of named files.

A *lane* has one writer at a time (`main` belongs to the merger, `w-03` to one worker). A *version*
is an immutable listing {path: Ref}; publishing makes the next one all at once or not at all.
`expect` is the only compare-and-swap: the publish fails with `Conflict` when the lane's head is
not that version. Bytes are staged first and named by their sha256, so the contested step moves a
few kilobytes whatever the model's size.

A publish may fail with `Unknown`: the caller cannot tell whether it landed and must ask
`lookup(lane, nonce)`. Success is never inferred from an error code, on any backend. Everything
else that fails for a passing reason (network, overload, a quota) raises `Busy`: nothing happened,
ask again later. `Publication` holds both rules. Source: spec hub.md E and fleet.md 5.2.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from diffurefill.config import UserError

MAIN = "main"


class StoreError(Exception):
    """Base of everything a store raises on purpose."""


class Conflict(StoreError):
    """The lane's head is not the expected version; nothing was published."""


class Busy(StoreError):
    """The store asks to try again after `retry_after` seconds; nothing was published."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unknown(StoreError):
    """A publish whose outcome is not known: ask `lookup` before doing anything else."""


class NotFound(StoreError):
    """No such lane, version or file."""


class Corrupt(StoreError):
    """A file's size or sha256 is not what its Ref says, twice in a row."""


class Denied(StoreError):
    """The store cannot be written (read-only, full, wrong token). Never retried."""


class UnsafeStore(StoreError):
    """The store ignores conditional writes: two mergers could overwrite each other."""


class NoRun(UserError):
    """Nothing is at an address that should be a run's."""

    def __init__(self, uri: str, otherwise: str = "", stranger: str = "") -> None:
        """`stranger`: a file of something else that lies there."""
        if stranger:
            super().__init__(
                f"no run at {uri}, which holds other files ({stranger} among them): give the "
                "address of a run, or make one with `diffurefill init ./run`"
            )
        else:
            super().__init__(f"no run at {uri}: make one with `diffurefill init {uri}`{otherwise}")


@dataclass(frozen=True)
class Ref:
    """A file's bytes, by content. `size` in bytes."""

    sha256: str
    size: int

    def to_json(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "size": self.size}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Ref:
        return cls(sha256=record["sha256"], size=record["size"])


@dataclass(frozen=True)
class Version:
    """One published version of a lane. `id` is the backend's token; compare it, never parse it."""

    lane: str
    id: str
    nonce: str
    files: Mapping[str, Ref]

    def ref(self, path: str) -> Ref:
        try:
            return self.files[path]
        except KeyError:
            raise NotFound(f"{self.lane}@{self.id} holds no {path}") from None


Change = bytes | Ref | None
"""New content of a path: bytes (small), a staged Ref, or None to remove it."""


class Store(Protocol):
    """What a backend gives. Every method may raise a StoreError; none retries for ever."""

    @property
    def uri(self) -> str: ...

    def selftest(self) -> None:
        """Prove that conditional writes are honoured; raises UnsafeStore or Denied.

        Run by `init` and by every merger at its start.
        """
        ...

    def check_access(self) -> None:
        """Raises Denied at once, saying what to do, when this process cannot write here.

        Cheap: run by every process at its start, before it trains for ten minutes.
        """
        ...

    def lanes(self) -> list[str]:
        """Names of the lanes that have a version, sorted."""
        ...

    def head(self, lane: str = MAIN) -> Version | None:
        """The newest version of `lane`, or None for a lane nobody has written."""
        ...

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        """The head id of each lane, in one cheap call."""
        ...

    def stage(self, source: Path) -> Ref:
        """Upload a file's bytes. Invisible until published; idempotent by digest."""
        ...

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
    ) -> Version:
        """The next version of `lane`: `expect`'s files with `changes` laid over them, atomically.

        `expect=None` means the lane must not exist yet. Raises Conflict when the head is not
        `expect`, Unknown when the outcome is not known. `nonce` (made here when None) is kept in
        the version.
        """
        ...

    def fetch(self, ref: Ref, dest: Path) -> Path:
        """Copy the bytes to `dest`, verified by size and sha256, whole or not at all."""
        ...

    def read(self, ref: Ref) -> bytes:
        """The verified bytes of a small file."""
        ...

    def lookup(self, lane: str, nonce: str) -> Version | None:
        """The version published with `nonce`, or None: decides an unknown outcome."""
        ...

    def history(self, lane: str) -> Iterator[Version]:
        """Every version still kept, oldest first."""
        ...

    def compact(self, lane: str, expect: Version) -> Version:
        """Give back the room of what only older versions of `lane` need; returns the head.

        The head keeps its nonce and every file; its id may be new. Of older versions nothing is
        sure to stay, except the files that a head of some lane names too. Only the lane's writer
        may do it, straight after a publish of its own. Raises Conflict when the head is not
        `expect`.
        """
        ...


_LANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")


def is_lane(name: str) -> bool:
    """Whether `name` may name a lane on every backend (a folder, a branch, a key)."""
    return _LANE.fullmatch(name) is not None


def check_lane(name: str) -> None:
    if not is_lane(name):
        raise UserError(f"lane name {name!r}: use letters, digits and - only")


def check_path(path: str) -> None:
    parts = PurePosixPath(path).parts
    if "/".join(parts) != path or not parts or ".." in parts or "\\" in path or path[0] == "/":
        raise UserError(f"path {path!r}: use a plain relative path such as log/w-01.jsonl")


def new_nonce() -> str:
    return uuid.uuid4().hex


def sha256_file(path: Path) -> Ref:
    """The Ref of a local file, read once in 1 MiB pieces."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
            size += len(block)
    return Ref(sha256=digest.hexdigest(), size=size)


def read_json(store: Store, version: Version, path: str) -> dict[str, Any]:
    """The JSON object at `path` of `version`; Corrupt when it does not parse."""
    try:
        record = json.loads(store.read(version.ref(path)))
    except ValueError as error:
        raise Corrupt(f"{version.lane}@{version.id}: {path} is not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise Corrupt(f"{version.lane}@{version.id}: {path} is not a JSON object")
    return record


def dump_json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


MAX_DOUBTS = 8
"""Attempts whose outcome had to be looked up before a publish is given up."""


class Publication:
    """One publish, attempted until its outcome is certain (spec fleet.md 5.2, ambiguity rule).

    `attempt` may raise Busy: call it again later, it knows what is still in doubt. The nonce is
    the same in every attempt, so a late answer to an earlier one is recognised as ours.
    """

    def __init__(
        self, store: Store, lane: str, changes: Mapping[str, Change], *, expect: Version | None
    ) -> None:
        self._store, self._lane, self._changes, self._expect = store, lane, changes, expect
        self.nonce = new_nonce()
        self._doubt: StoreError | None = None
        self._doubts = 0

    def attempt(self) -> Version:
        """The published version. Raises Conflict only when it is certain that this publish did
        not land and the head moved, Busy when that cannot be said yet."""
        store, lane = self._store, self._lane
        if self._doubt is not None and (landed := self._landed(self._doubt)) is not None:
            return landed
        try:
            return store.publish(lane, self._changes, expect=self._expect, nonce=self.nonce)
        except (Conflict, Unknown) as doubt:
            self._doubt = doubt
            self._doubts += 1
            if (landed := self._landed(doubt)) is not None:
                return landed
        raise Busy(f"lane {lane}: the outcome of a publish is not certain yet", 1.0)

    def _landed(self, doubt: StoreError) -> Version | None:
        """Our version if it is there; None when the lane has not moved; else Conflict."""
        landed = self._store.lookup(self._lane, self.nonce)
        if landed is not None:
            return landed
        head, expect = self._store.head(self._lane), self._expect
        if (
            head is not None and head.nonce == self.nonce
        ):  # the lookup was answered by a lagging hub
            return head
        if (head.id if head else None) != (expect.id if expect else None):
            was = expect.id if expect else "it was empty"
            raise Conflict(f"lane {self._lane} has moved on since {was}") from doubt
        if self._doubts >= MAX_DOUBTS:
            raise Denied(
                f"lane {self._lane} refused {self._doubts} publishes although nobody else wrote: "
                "check that the token may write to the store"
            ) from doubt
        return None


def publish_surely(
    store: Store, lane: str, changes: Mapping[str, Change], *, expect: Version | None
) -> Version:
    """A Publication with one immediate repeat, for callers that do not wait."""
    publication = Publication(store, lane, changes, expect=expect)
    try:
        return publication.attempt()
    except Busy:
        return publication.attempt()


def compact_surely(store: Store, lane: str, expect: Version) -> Version:
    """`compact`, where a Conflict may be about an earlier attempt of our own whose answer was lost:
    a compaction keeps the head's nonce."""
    try:
        return store.compact(lane, expect)
    except Conflict:
        head = store.head(lane)
        if head is None or head.nonce != expect.nonce:
            raise
        return head


ADDRESSES = (
    "a folder such as ./run, hf://user/repo, hf://buckets/user/name/run, s3://bucket/run, "
    "gs://bucket/run or az://account/container/run"
)


SCHEMES = ("hf", "s3", "gs", "az", "file")


def folder_of(uri: str) -> Path | None:
    """The folder that `uri` names; None where it names something else. UserError for an address
    that lost a slash: a folder of that name would be no place to meet."""
    scheme, separator, rest = uri.partition("://")
    if separator and scheme != "file":
        return None
    near, colon, path = uri.partition(":")
    if not separator and colon and near in SCHEMES:
        raise UserError(f"{uri}: did you mean {near}://{path.lstrip('/')}? (a folder: ./{uri})")
    return Path(rest if separator else uri)


def open_store(uri: str, *, create: bool = False) -> Store:
    """The store at `uri`; `create` makes it where that is possible. Imports one backend only."""
    folder = folder_of(uri)
    if folder is not None:
        from diffurefill.store.folder import FolderStore

        return FolderStore(folder, create=create)
    scheme = uri.partition("://")[0]
    if _is_repository(uri):
        from diffurefill.store.hub import HubStore

        return HubStore(uri, create=create)
    if scheme in ("hf", "s3", "gs", "az"):
        from diffurefill.store.objects import open_objects

        return open_objects(uri, create=create)
    raise UserError(f"no store speaks {scheme}://; give {ADDRESSES}")


def _is_repository(uri: str) -> bool:
    return uri.startswith("hf://") and not uri.startswith("hf://buckets/")


def require_free(uri: str) -> None:
    """What is in the way of a new run at `uri`, as far as it shows before the run is made: a run,
    somebody else's files, no keys. Makes no store. Raises UserError, or what opening one raises."""
    try:
        open_store(uri)
    except NoRun:
        if _is_repository(uri):
            from diffurefill.store.hub import require_token

            require_token(uri)
        return
    store = open_store(uri, create=True)  # makes nothing new, and says whether a run may be made
    require_no_run(store)
    store.check_access()


def require_no_run(store: Store) -> None:
    if store.head(MAIN) is not None:
        raise UserError(f"there is a run at {store.uri} already: join it, or give another place")
