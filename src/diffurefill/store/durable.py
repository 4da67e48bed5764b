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
from diffurefill.store.base import Denied, Ref, new_nonce

# What the person can do about an error; the kernel says these before it has done anything.
ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there, then start again"),
    **dict.fromkeys((errno.EACCES, errno.EROFS), "choose a folder that this user can write"),
    errno.EPERM: "choose a folder that this user can write, on a disk with hard links",
    **dict.fromkeys((errno.ENOTSUP, errno.ENOSYS), "choose a disk with hard links"),
}


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` last: a rename or link lives in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with os_errors_name(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """`folder` and its parents, each made to last in the one above it. Raises UserError where one
    of them is a file."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give the path of a folder, for example ./run")
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
def os_errors_as_denied() -> Generator[None]:
    """OSError -> Denied with what to do. For steps that leave nothing visible when they fail."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "check the disk, then start again")
        where = f" {error.filename}" if error.filename else ""
        raise Denied(f"cannot use the store{where}: {error.strerror}; {advice}") from error
