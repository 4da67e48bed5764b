"""Files of text wherever they lie: listed, pinned to a commit, and read in ranges."""

from __future__ import annotations

import codecs
import contextlib
import glob
import io
import os
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

from diffurefill.config import UserError
from diffurefill.data.storage.layout import (
    folder_files,
    has_magic,
    in_order,
    is_hidden,
    is_text,
    split_pattern,
)
from diffurefill.data.storage.listing import File

_SNIFF_BYTES = 1 << 16


class RandomAccess(Protocol):
    """An open file of which any range can be read; safe to use from one thread at a time."""

    uri: str
    size: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly the bytes [offset, offset + length), cut at the file's end."""
        ...

    def close(self) -> None: ...


class LocalFile:
    """See RandomAccess."""

    def __init__(self, path: str | Path) -> None:
        self.uri = str(path)
        with _errors_named(self.uri):
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.size = os.fstat(self._file.fileno()).st_size

    def read_at(self, offset: int, length: int) -> bytes:
        wanted = max(min(length, self.size - offset), 0)
        parts = []
        while wanted:
            part = os.pread(self._file.fileno(), wanted, offset)
            if not part:
                raise UserError(
                    f"{self.uri} became shorter while it was read: every position in it is void; "
                    "name a fixed copy, or start a new run"
                )
            parts.append(part)
            offset, wanted = offset + len(part), wanted - len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()


class Stream(io.RawIOBase):
    """A RandomAccess as a seekable binary file; wrap it in io.BufferedReader to read ahead."""

    def __init__(self, file: RandomAccess, offset: int = 0) -> None:
        super().__init__()
        self._file, self._position = file, offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = start[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview | bytearray, /) -> int:  # type: ignore[override]
        data = self._file.read_at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


# --- addresses -----------------------------------------------------------------------------------


def list_files(path: str) -> list[File]:
    """The files that `path` names, in an order that depends on no machine: a file, a folder or a
    glob; on this machine, in a data set of the hub (hf://datasets/owner/name[@revision]/...), in a
    bucket (s3://, gs://, az://), or one file over http.

    A folder is every Parquet, Arrow, JSONL and text file below it; of splits the train split alone.
    Raises UserError where there is nothing, or no way to it.
    """
    if "://" in path:
        from diffurefill.data.storage.remote import (
            list_remote,  # the network's libraries load slowly
        )

        return list_remote(path)
    with _errors_named(path):
        return _list_local(path)


def pinned(path: str) -> str:
    """`path` with the branch of a hub's data set replaced by the commit that it points to now;
    other paths as they are. Raises UserError when the hub does not say."""
    if "://" in path:
        from diffurefill.data.storage.remote import pinned_remote

        return pinned_remote(path)
    return path


def open_file(uri: str) -> RandomAccess:
    """The file at `uri`; UserError when it cannot be read."""
    if "://" in uri:
        from diffurefill.data.storage.remote import open_remote

        return open_remote(uri)
    return LocalFile(uri)


def read_whole(uri: str) -> bytes:
    """All bytes of a small file."""
    file = open_file(uri)
    try:
        return file.read_at(0, file.size)
    finally:
        file.close()


def looks_like_text(file: RandomAccess) -> bool:
    """Whether its first bytes are UTF-8 without zeros."""
    try:
        # Not final: the sniffed bytes may end within a character.
        decoder = codecs.getincrementaldecoder("utf-8")()
        return "\0" not in decoder.decode(file.read_at(0, _SNIFF_BYTES))
    except UnicodeDecodeError:
        return False


# --- this machine --------------------------------------------------------------------------------


def _list_local(path: str) -> list[File]:
    if os.path.isfile(path):
        return [_local_file(path, os.path.basename(path))]
    if os.path.isdir(path):
        folder, names = path, _below(path)
    elif has_magic(path):
        folder, names = _matches(path)
        if not names:
            raise UserError(f"no file matches the data source {path}: check the pattern")
    else:
        raise UserError(f"no such file or folder: {path} (data.sources)")
    return [_local_file(os.path.join(folder, name), name) for name in names]


def _matches(pattern: str) -> tuple[str, list[str]]:
    """(the pattern's fixed folder, names below it); a folder that matches gives what it holds."""
    root = split_pattern(pattern)[0] or ("/" if pattern.startswith("/") else "")
    names: set[str] = set()
    for match in glob.glob(pattern, recursive=True):
        if not os.path.lexists(match):  # `glob` gives the folder of `folder/**` unseen
            continue
        name = Path(match).relative_to(root)
        inside = _below(match) if os.path.isdir(match) else [""]
        names.update((name / below).as_posix() for below in inside)
    return root, in_order(names)


def _below(folder: str) -> list[str]:
    """What `folder_files` takes of a folder, without text files that are none."""
    found = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not is_hidden(name)]
        inside = Path(parent).relative_to(folder)
        found += [(inside / name).as_posix() for name in names]
    return [
        name for name in folder_files(found) if not is_text(name) or _is_text_file(folder, name)
    ]


def _is_text_file(folder: str, name: str) -> bool:
    file = LocalFile(os.path.join(folder, name))
    try:
        return looks_like_text(file)
    finally:
        file.close()


def _local_file(path: str, name: str) -> File:
    return File(path, name, os.stat(path).st_size)


def _raise(error: OSError) -> None:
    raise error


@contextlib.contextmanager
def _errors_named(path: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"no such file or folder: {error.filename or path}") from None
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename or path}: {error.strerror or error}"
        ) from None
