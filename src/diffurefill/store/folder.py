"""A run in a folder: blobs named by their sha256, and numbered manifests published by link(2).

    blobs/sha256/ab/<digest>     immutable bytes
    lanes/<lane>/00000042.json   version 42 of a lane: {lane, id, nonce, files, previous}
    lanes/<lane>/HEAD            a hint; the head is the last number of the gapless sequence
    tmp/                         files being written

link(2) makes a complete, fsynced manifest appear under its number or fails because the number is
taken. That is the compare-and-swap: no lock file, so nothing is left locked by a killed process.
Numbers are never pruned: a writer asleep for a day must not find its number free again.
Source: spec hub.md C4.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from diffurefill.store.base import (
    MAIN,
    Change,
    Conflict,
    Corrupt,
    NoRun,
    NotFound,
    Ref,
    Unknown,
    Version,
    check_lane,
    is_lane,
    new_nonce,
)
from diffurefill.store.durable import (
    ADVICE,
    copy_errors,
    disk_errors,
    fsync_folder,
    make_folder,
    removed_at_exit,
    replace_durably,
    require_folder,
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

PARTS = ("blobs", "lanes", "tmp")
BLOCK_BYTES = 1 << 20
STALE_TMP_SECONDS = 86_400.0
_TMP_NAME = re.compile(r"[0-9a-f]{32}\.tmp")
"""What `_tmp` calls its files: a person may keep others in a folder of that name."""


def strangers(root: Path) -> list[str]:
    """What lies in `root` and is of no store, in order; hidden files are nobody's."""
    if not root.is_dir():
        return []
    with disk_errors(root):
        names = sorted(path.name for path in root.iterdir())
    return [name for name in names if name not in PARTS and not name.startswith(".")]


class FolderStore:
    """The Store contract (base.py) on a file system that has hard links."""

    def __init__(self, root: Path, *, create: bool) -> None:
        """Opens the run at `root`; `create` makes the folder. Raises UserError or Denied."""
        self.uri = str(root)
        self.root = root.absolute()
        self.grace_seconds = GRACE_SECONDS
        require_folder(self.root)
        if create:
            with disk_errors(self.root):
                for name in PARTS:
                    make_folder(self.root / name)
        elif not (self.root / "lanes").is_dir():
            raise NoRun(str(root), stranger=next(iter(strangers(root)), ""))

    def selftest(self) -> None:
        # A fresh name: two mergers may test at once, and a killed test leaves its lane behind.
        lane = f"{SELFTEST_LANE}-{new_nonce()[:8]}"
        try:
            prove_conditional_writes(self, lane)
        finally:
            shutil.rmtree(self.root / "lanes" / lane, ignore_errors=True)
        self._sweep_tmp()

    def check_access(self) -> None:
        with disk_errors(self.root):
            self._now()

    def lanes(self) -> list[str]:
        with disk_errors(self.root):
            names = sorted(path.name for path in (self.root / "lanes").iterdir())
        ours = [n for n in names if is_lane(n) and not n.startswith(SELFTEST_LANE)]
        return [name for name in ours if self._head_number(name)]

    def head(self, lane: str = MAIN) -> Version | None:
        number = self._head_number(lane)
        return self._read_manifest(lane, number) if number else None

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        numbers = {lane: self._head_number(lane) for lane in lanes}
        return {lane: str(number) if number else None for lane, number in numbers.items()}

    def stage(self, source: Path) -> Ref:
        with open(source, "rb") as f, disk_errors(self.root):
            return self._write_blob(iter(lambda: f.read(BLOCK_BYTES), b""))

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
    ) -> Version:
        check_paths(changes)
        require_head(lane, self.head(lane), expect)  # saves work: link decides
        with disk_errors(self.root):
            version = next_version(lane, expect, changes, nonce, self._blob_of)
            self._publish_manifest(version)
        return version

    def fetch(self, ref: Ref, dest: Path) -> Path:
        blob = self._blob_path(ref)
        part = dest.with_name(f".{dest.name}.{new_nonce()}.part")
        with copy_errors(dest), removed_at_exit(part):
            dest.parent.mkdir(parents=True, exist_ok=True)
            for _attempt in range(2):
                blocks = self._blob_blocks(ref)
                with contextlib.closing(blocks), open(part, "wb") as f:
                    copied = write_hashed(blocks, f)
                if copied == ref:
                    replace_durably(part, dest)
                    return dest
        raise _corrupt_blob(blob)

    def read(self, ref: Ref) -> bytes:
        for _attempt in range(2):
            with disk_errors(self.root), self._open_blob(ref) as f:
                content = f.read()
            if Ref(hashlib.sha256(content).hexdigest(), len(content)) == ref:
                return content
        raise _corrupt_blob(self._blob_path(ref))

    def lookup(self, lane: str, nonce: str) -> Version | None:
        # Newest first: the doubt to settle is nearly always about the last publish or two.
        for number in range(self._head_number(lane), 0, -1):
            version = self._read_manifest(lane, number)
            if version.nonce == nonce:
                return version
        return None

    def history(self, lane: str) -> Iterator[Version]:
        for number in range(1, self._head_number(lane) + 1):
            yield self._read_manifest(lane, number)

    def compact(self, lane: str, expect: Version) -> Version:
        older = [self._read_manifest(lane, number) for number in range(1, number_of(expect))]
        candidates = refs_of(older)
        # The heads last: nearest to the deletions that depend on them.
        require_head(lane, self.head(lane), expect)
        needed = refs_of(self.head(each) for each in self.lanes())
        with disk_errors(self.root):
            now = self._now()
            for path in map(self._blob_path, candidates - needed):
                with contextlib.suppress(FileNotFoundError):
                    if now - path.stat().st_mtime >= self.grace_seconds:
                        path.unlink()
        return expect

    # --- lanes ---

    def _manifest_path(self, lane: str, number: int) -> Path:
        return self.root / "lanes" / lane / manifest_name(number)

    def _head_number(self, lane: str) -> int:
        """The last number of the gapless sequence; 0 for a lane nobody has written."""
        check_lane(lane)
        with disk_errors(self.root):
            try:
                number = int((self.root / "lanes" / lane / "HEAD").read_text("ascii"))
            except (FileNotFoundError, ValueError):
                number = 0
            if not self._manifest_path(lane, number).exists():
                number = 0
            while self._manifest_path(lane, number + 1).exists():
                number += 1
        return number

    def _read_manifest(self, lane: str, number: int) -> Version:
        path = self._manifest_path(lane, number)
        with disk_errors(self.root):
            content = path.read_bytes()
        return parse_manifest(content, path, lane, number)

    def _publish_manifest(self, version: Version) -> None:
        path = self._manifest_path(version.lane, number_of(version))
        make_folder(path.parent)
        with self._tmp() as tmp:
            with open(tmp, "xb") as f:
                write_hashed([dump_manifest(version)], f)
            _link(tmp, path)
        try:
            fsync_folder(path.parent)
        except OSError as error:
            # Readers see it already, but a power cut may still take it back.
            raise Unknown(f"{path} may not last: {error.strerror}") from error
        with contextlib.suppress(OSError), self._tmp() as tmp:  # a hint: stale or absent is fine
            tmp.write_text(version.id, "ascii")
            os.replace(tmp, path.with_name("HEAD"))

    # --- blobs ---

    def _blob_path(self, ref: Ref) -> Path:
        return self.root / blob_name(ref)

    def _open_blob(self, ref: Ref) -> BinaryIO:
        path = self._blob_path(ref)
        try:
            return open(path, "rb")
        except FileNotFoundError:
            raise NotFound(f"no blob {path}") from None

    def _blob_blocks(self, ref: Ref) -> Generator[bytes]:
        """Its bytes, piece by piece; what goes wrong here is the store's doing."""
        with disk_errors(self._blob_path(ref)), self._open_blob(ref) as f:
            while block := f.read(BLOCK_BYTES):
                yield block

    def _blob_of(self, change: bytes | Ref) -> Ref:
        if isinstance(change, bytes):
            return self._write_blob([change])
        if not self._blob_path(change).exists():
            raise NotFound(f"no blob {change.sha256}: stage the file before publishing it")
        return change

    def _write_blob(self, blocks: Iterable[bytes]) -> Ref:
        """Always writes, so that staging again also heals a blob damaged on disk."""
        with self._tmp() as tmp:
            with open(tmp, "xb") as f:
                ref = write_hashed(blocks, f)
            path = self._blob_path(ref)
            make_folder(path.parent)
            replace_durably(tmp, path)
        return ref

    # --- tmp ---

    @contextlib.contextmanager
    def _tmp(self) -> Generator[Path]:
        """A name for a new file, which is gone afterwards unless it was moved."""
        folder = self.root / "tmp"
        make_folder(folder)  # a copy of a run may lack its empty folders
        path = folder / f"{new_nonce()}.tmp"
        with removed_at_exit(path):
            yield path

    def _now(self) -> float:
        """The file system's own clock, read by writing: mtimes are only compared with it."""
        with self._tmp() as probe:
            with open(probe, "xb") as f:
                write_hashed([b"probe"], f)
            return probe.stat().st_mtime

    def _sweep_tmp(self) -> None:
        """Remove what killed processes left a day ago or more."""
        with disk_errors(self.root):
            now = self._now()
            for path in (self.root / "tmp").iterdir():
                if not _TMP_NAME.fullmatch(path.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    is_stale = now - found.st_mtime > STALE_TMP_SECONDS
                    if is_stale and stat.S_ISREG(found.st_mode):
                        path.unlink()


# --- helpers ---


def _link(tmp: Path, path: Path) -> None:
    """The one contested step: `path` appears whole, or it was there before (Conflict)."""
    try:
        os.link(tmp, path)
    except FileExistsError:
        raise Conflict(f"{path.parent.name}@{int(path.stem)} was published by another") from None
    except OSError as error:
        if error.errno in ADVICE:
            raise
        raise Unknown(f"{path}: {error.strerror}; it may have been published") from error


def _corrupt_blob(path: Path) -> Corrupt:
    return Corrupt(f"{path}: its bytes are not what its name says; restore it from a copy")
