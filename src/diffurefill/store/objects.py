"""A run in a bucket: immutable blobs, and one small object per lane that is moved by a
conditional write.

    blobs/sha256/ab/<digest>            immutable bytes
    lanes/<lane>/head.json              the newest version's manifest: the only contested object
    lanes/<lane>/versions/00000041.json every version before it, with the bytes its head.json had
    lanes/<lane>/compacted.json         how far `compact` has got
    clock                               rewritten by whoever asks what time it is there

A publish first copies the head it read to `versions/`, then puts the next manifest over head.json
on condition that it still has the tag (ETag, or GCS generation) it had when it was read.
- Killed between the two: the copy is of the version that is still the head; the next writer makes
  it again. So `versions/` has no gap below the head, and needs no condition: whoever writes
  number n there writes the same bytes, a writer that slept for a day included.
- The answer to the second is lost: an attempt's number is known before it is sent, so the version
  with that number says, now or later, whether it is ours.
- A tag that returns (an MD5 does, when old content does) is no danger: every manifest holds its
  number and a nonce, so no content returns.
The other scheme of spec hub.md C4, numbered manifests that are created once, needs only
create-if-absent, but then finding a head takes several requests or trust in a listing, and every
server that we would use has both conditions: `selftest` refuses the rest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from diffurefill.store.addresses import open_bucket
from diffurefill.store.base import (
    MAIN,
    Busy,
    Change,
    Conflict,
    Corrupt,
    NotFound,
    Ref,
    Unknown,
    UnsafeStore,
    Version,
    check_lane,
    dump_json,
    is_lane,
    new_nonce,
    sha256_file,
)
from diffurefill.store.bucket import Bucket
from diffurefill.store.durable import (
    copy_errors,
    removed_at_exit,
    replace_durably,
    write_hashed,
)
from diffurefill.store.layout import (
    GRACE_SECONDS,
    SELFTEST_LANE,
    blob_name,
    check_paths,
    dump_manifest,
    manifest_name,
    next_version,
    number_of,
    parse_manifest,
    refs_of,
    require_head,
)
from diffurefill.store.selftest import prove_conditional_writes

NUM_HEADS = 8
"""Heads asked for at once."""


def open_objects(uri: str, *, create: bool) -> ObjectStore:
    """The run at `uri` (addresses.py). A bucket is never made here: `create` asks for nothing."""
    return ObjectStore(open_bucket(uri))


class ObjectStore:
    """The Store contract (base.py) on a bucket with conditional writes."""

    def __init__(self, bucket: Bucket) -> None:
        self.uri = bucket.uri
        self.grace_seconds = GRACE_SECONDS
        self._bucket = bucket
        self._first_tried: dict[tuple[str, str], int] = {}

    def selftest(self) -> None:
        # A fresh name: two mergers may test at once, and a killed test leaves its lane behind.
        lane = f"{SELFTEST_LANE}-{new_nonce()[:8]}"
        try:
            self._prove_conditions(f"lanes/{lane}/probe")
            prove_conditional_writes(self, lane)
        finally:
            for key in self._bucket.keys_below(f"lanes/{lane}"):
                self._bucket.delete(key)

    def check_access(self) -> None:
        self._bucket.now()

    def lanes(self) -> list[str]:
        names = sorted(self._bucket.folders("lanes"))
        return [n for n in names if is_lane(n) and not n.startswith(SELFTEST_LANE)]

    def head(self, lane: str = MAIN) -> Version | None:
        key = _head_key(lane)
        content = self._bucket.get(key)
        return None if content is None else parse_manifest(content, self._bucket.where(key), lane)

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        heads = self._heads(lanes)
        return {lane: head.id if head else None for lane, head in heads.items()}

    def stage(self, source: Path) -> Ref:
        ref = sha256_file(source)
        self._bucket.put(blob_name(ref), source)
        return ref

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
    ) -> Version:
        check_paths(changes)
        key = _head_key(lane)
        # The tag before the content: a tag that is too old only fails the write.
        tag = self._bucket.meta(key)
        content = self._bucket.get(key) if tag else None
        head = parse_manifest(content, self._bucket.where(key), lane) if content else None
        require_head(lane, head, expect)
        version = next_version(lane, expect, changes, nonce, self._blob_of)
        if content and head:
            self._bucket.put(_version_key(lane, number_of(head)), content)
        self._first_tried.setdefault((lane, version.nonce), number_of(version))
        try:
            self._bucket.put_if(key, dump_manifest(version), tag)
        except Conflict:
            if not self._landed(version):
                raise
        return version

    def fetch(self, ref: Ref, dest: Path) -> Path:
        key = blob_name(ref)
        part = dest.with_name(f".{dest.name}.{new_nonce()}.part")
        with copy_errors(dest), removed_at_exit(part):
            dest.parent.mkdir(parents=True, exist_ok=True)
            for _attempt in range(2):
                if self._size(ref) != ref.size:
                    continue
                windows = self._bucket.windows(key, ref.size)
                with open(part, "wb") as f, contextlib.closing(windows):
                    copied = write_hashed(windows, f)
                if copied == ref:
                    replace_durably(part, dest)
                    return dest
        raise self._corrupt(ref)

    def read(self, ref: Ref) -> bytes:
        for _attempt in range(2):
            content = self._bucket.get(blob_name(ref), max_bytes=ref.size)
            if content is None:
                raise self._no_blob(ref)
            if Ref(sha256(content).hexdigest(), len(content)) == ref:
                return content
        raise self._corrupt(ref)

    def lookup(self, lane: str, nonce: str) -> Version | None:
        # Newest first, and no further back than this process can have published with it.
        version = self.head(lane)
        while version is not None and version.nonce != nonce:
            number = number_of(version) - 1
            if number < self._first_tried.get((lane, nonce), 1):
                return None
            version = self._version(lane, number)
        return version

    def history(self, lane: str) -> Iterator[Version]:
        head = self.head(lane)
        for number in range(1, number_of(head)):
            yield self._version(lane, number)
        if head is not None:
            yield head

    def compact(self, lane: str, expect: Version) -> Version:
        bookmark = f"lanes/{lane}/compacted.json"
        done, candidates = _parse_bookmark(self._bucket.get(bookmark))
        older = range(done + 1, number_of(expect))
        candidates |= refs_of(self._version(lane, number) for number in older)
        young, old = self._by_age(candidates)
        # The heads last: nearest to the deletions that depend on them.
        heads = self._heads(sorted({lane, *self.lanes()}))
        require_head(lane, heads[lane], expect)
        needed = refs_of(heads.values())
        for ref in old - needed:
            self._bucket.delete(blob_name(ref))
        left = sorted((ref.sha256, ref.size) for ref in young | (old & needed))
        record = {"through": number_of(expect) - 1, "left": left}
        self._bucket.put(bookmark, dump_json(record))
        return expect

    # --- lanes ---

    def _heads(self, lanes: list[str]) -> dict[str, Version | None]:
        with ThreadPoolExecutor(NUM_HEADS) as pool:
            return dict(zip(lanes, pool.map(self.head, lanes), strict=True))

    def _version(self, lane: str, number: int) -> Version:
        """A version before the head. Corrupt when it is gone: someone deleted it."""
        key = _version_key(lane, number)
        content = self._bucket.get(key)
        if content is None:
            raise Corrupt(f"{self._bucket.where(key)} is missing: restore it from a copy")
        return parse_manifest(content, self._bucket.where(key), lane, number)

    def _landed(self, version: Version) -> bool:
        """Whether a refused write is there all the same: something below us sent it twice."""
        try:
            return self.lookup(version.lane, version.nonce) is not None
        except Busy as error:
            raise Unknown(f"lane {version.lane}: {error}") from None

    def _prove_conditions(self, key: str) -> None:
        """Each condition alone: `publish` looks before it writes, which would hide their lack."""
        bucket = self._bucket
        bucket.put_if(key, b"1", None)
        first = bucket.meta(key)
        bucket.put_if(key, b"2", first)
        for tag, fault in ((None, "created an object twice"), (first, "took a stale update")):
            try:
                bucket.put_if(key, b"3", tag)
            except Conflict:
                continue
            raise UnsafeStore(
                f"{self.uri} {fault}: two mergers would overwrite each other; "
                "keep the run in a store with conditional writes"
            )

    # --- blobs ---

    def _blob_of(self, change: bytes | Ref) -> Ref:
        if isinstance(change, bytes):
            ref = Ref(sha256(change).hexdigest(), len(change))
            self._bucket.put(blob_name(ref), change)
            return ref
        self._size(change)
        return change

    def _size(self, ref: Ref) -> int:
        meta = self._bucket.meta(blob_name(ref))
        if meta is None:
            raise self._no_blob(ref)
        return meta["size"]

    def _by_age(self, refs: set[Ref]) -> tuple[set[Ref], set[Ref]]:
        """(younger than the grace period, older), without those that are gone already."""
        now = self._bucket.now()
        young: set[Ref] = set()
        old: set[Ref] = set()
        for ref in refs:
            meta = self._bucket.meta(blob_name(ref))
            if meta is not None:
                age = (now - meta["last_modified"]).total_seconds()
                (old if age >= self.grace_seconds else young).add(ref)
        return young, old

    def _no_blob(self, ref: Ref) -> NotFound:
        return NotFound(f"{self.uri} has no blob {ref.sha256}: a file is staged before it is named")

    def _corrupt(self, ref: Ref) -> Corrupt:
        where = self._bucket.where(blob_name(ref))
        return Corrupt(f"{where}: its bytes are not what its name says; restore it from a copy")


def _head_key(lane: str) -> str:
    check_lane(lane)
    return f"lanes/{lane}/head.json"


def _version_key(lane: str, number: int) -> str:
    return f"lanes/{lane}/versions/{manifest_name(number)}"


def _parse_bookmark(content: bytes | None) -> tuple[int, set[Ref]]:
    """(number up to which every blob is gone or listed, the listed ones); from 0 when unusable."""
    try:
        record = json.loads(content or b"")
        return int(record["through"]), {Ref(digest, size) for digest, size in record["left"]}
    except (ValueError, KeyError, TypeError):
        return 0, set()
