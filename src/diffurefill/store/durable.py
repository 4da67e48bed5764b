"""Files that are whole or absent, also after a kill or a power cut.

Used by the folder store and by checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import BinaryIO

from diffurefill.config import UserError
from diffurefill.store.base import Busy, Denied, Ref, new_nonce

# What the person can do about an error; the kernel says these before it has done anything.
ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there, then start again"),
    **dict.fromkeys((errno.EACCES, errno.EROFS), "choose a folder that this user can write"),
    errno.EPERM: "choose a folder that this user can write, on a disk with hard links",
    **dict.fromkeys((errno.ENOTSUP, errno.ENOSYS), "choose a disk with hard links"),
    errno.EFBIG: "the system allows no larger file (ulimit -f): raise that limit",
}
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""What a shared file system answers while its server is away."""
PASSING_PAUSE = 5.0
"""Seconds."""


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` last: a rename or link lives in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with os_errors_name(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_folder(folder: Path) -> None:
    """Raises UserError where `folder`, or what it would be made in, is a file."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if there.exists() and not there.is_dir():
        raise UserError(f"{there} is a file: give the path of a folder, for example ./run")


def make_folder(folder: Path) -> None:
    """`folder` and its parents, each made to last in the one above it. Raises UserError where one
    of them is a file."""
    require_folder(folder)
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def write_hashed(blocks: Iterable[bytes], f: BinaryIO) -> Ref:
    """Write `blocks` to `f`, fsynced; returns what was written."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        f.write(block)
        digest.update(block)
        size += len(block)
    f.flush()
    os.fsync(f.fileno())
    return Ref(sha256=digest.hexdigest(), size=size)


def replace_durably(part: Path, dest: Path) -> None:
    """Give the finished and fsynced file `part` the name `dest`, at once and for good."""
    os.replace(part, dest)
    fsync_folder(dest.parent)


def write_file(path: Path, content: bytes) -> None:
    """`path` holds its old content or the new one, never a part of either."""
    part = path.with_name(f".{path.name}.{new_nonce()}.part")
    with os_errors_name(path), removed_at_exit(part):
        with open(part, "xb") as f:
            write_hashed([content], f)
        replace_durably(part, path)


@contextlib.contextmanager
def removed_at_exit(part: Path) -> Generator[Path]:
    """Whatever happens, `part` is gone afterwards, unless it has been moved to its place."""
    try:
        yield part
    finally:
        # Suppressed: on a dying disk the error that brought us here is the one to report.
        with contextlib.suppress(OSError):
            part.unlink()


@contextlib.contextmanager
def os_errors_name(path: Path) -> Generator[None]:
    """An OSError that names no file names `path`: the kernel knows descriptors when it writes, and
    a person is to learn which disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def disk_errors(store: Path) -> Generator[None]:
    """OSError -> Denied with what to do, or Busy where it may pass. For steps at the files of the
    store in the folder `store` that leave nothing visible when they fail."""
    try:
        yield
    except OSError as error:
        what = f"cannot use the store {error.filename or store}: {error.strerror}"
        if error.errno in PASSING:
            raise Busy(what, PASSING_PAUSE) from error
        raise Denied(f"{what}; {_advice(error)}") from error


@contextlib.contextmanager
def copy_errors(dest: Path) -> Generator[None]:
    """OSError -> Denied with what to do. For writing a copy of a store's file to `dest`, which may
    lie on another disk than the store."""
    try:
        yield
    except OSError as error:
        raise Denied(
            f"cannot write a local copy in {dest.parent}: {error.strerror}; {_advice(error)} "
            "(DIFFUREFILL_CACHE names another disk)"
        ) from error


def _advice(error: OSError) -> str:
    return ADVICE.get(error.errno or 0, "check the disk, then start again")
