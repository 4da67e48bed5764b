"""Folders of local copies: where a process keeps what it has fetched, and what becomes of it.

They go with their process. What a killed one leaves, up to several times the model's size, the next
one on the same machine removes: a lock tells whether a folder is in use.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from diffurefill.toml import UserError

COPIES = "diffurefill-"
"""How the names of folders of local copies begin."""


def copies_place() -> Path:
    """Where local copies go: the folder that DIFFUREFILL_CACHE names, made where it is missing, or
    the temporary folder, which is small on many notebooks. UserError where it cannot be had."""
    named = os.environ.get("DIFFUREFILL_CACHE")
    with _place_is_writable(named):
        place = Path(named or tempfile.gettempdir())
        place.mkdir(parents=True, exist_ok=True)
    return place


@contextlib.contextmanager
def local_copies() -> Iterator[Path]:
    """A new folder for this process's local copies, which goes with it. Never shared and never
    trusted after a restart. What killed processes left there goes now.

    Raises UserError where no folder can be made.
    """
    place = copies_place()
    remove_left_copies(place)
    with _place_is_writable(str(place)):
        made = tempfile.TemporaryDirectory(prefix=COPIES, dir=place)
    with _locked(Path(made.name)), made as folder:  # the lock is held until the folder is gone
        copies = Path(folder) / "copies"
        copies.mkdir()
        yield copies


@contextlib.contextmanager
def _place_is_writable(place: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(
            f"local copies cannot go to {place or 'the temporary folder'} ({why}): "
            "name another folder in DIFFUREFILL_CACHE"
        ) from None


def _lock_name() -> str:
    """Of this machine: on a shared disk a lock that another one holds may look free from here."""
    return f"lock-{platform.node()}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock that tells that `folder` is in use; the system frees it however we end.

    It gets its name when it is held: seen under that name and free, its owner is gone. Where locks
    are not to be had there is none, and nobody removes the folder.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            new = folder / "lock.new"
            file = stack.enter_context(open(new, "wb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(folder / _lock_name())
        yield


def remove_left_copies(place: Path) -> None:
    """Remove folders of local copies in `place` whose processes are gone: a killed one leaves up to
    several times the model's size, and one that is killed again and again would fill the disk."""
    try:
        import fcntl
    except ImportError:
        return
    for lock in place.glob(f"{COPIES}*/{_lock_name()}"):
        # Held, of another user, or gone by now: not ours to remove.
        with contextlib.suppress(OSError), open(lock, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
