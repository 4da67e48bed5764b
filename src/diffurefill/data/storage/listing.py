"""Finding what an address names in a place that can list its files."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from diffurefill.config import UserError
from diffurefill.data.storage.layout import folder_files, has_magic, pattern_files, split_pattern


class File(NamedTuple):
    """`name` says what it is on every machine, `uri` where it is; `size` in bytes."""

    uri: str
    name: str
    size: int


class Listing(Protocol):
    """Paths are relative to the whole place: a repository, a bucket."""

    def size_of(self, path: str) -> int | None:
        """In bytes; None where there is no such file."""
        ...

    def below(self, folder: str) -> dict[str, int]:
        """{path: size} of every file in `folder` ("": everywhere); empty without the folder."""
        ...


def find_files(address: str, path: str, place: Listing) -> list[tuple[str, str, int]]:
    """(path, name, size) of each file that `path` names: a file, a folder, else a pattern.

    A name is relative to the folder, or to the fixed part of the pattern. UserError where there is
    nothing.
    """
    size = place.size_of(path) if path else None
    if size is not None:
        return [(path, path.rpartition("/")[2], size)]
    sizes = place.below(path)
    if sizes:
        folder, names = path, folder_files(_relative(sizes, path))
    elif has_magic(path):
        folder, pattern = split_pattern(path)
        sizes = place.below(folder)
        names = pattern_files(_relative(sizes, folder), pattern)
        if not names:
            raise UserError(f"no file matches the data source {address}: check the pattern")
    else:
        raise UserError(f"no such file or folder: {address}")
    prefix = f"{folder}/" if folder else ""
    return [(prefix + name, name, sizes[prefix + name]) for name in names]


def _relative(paths: dict[str, int], folder: str) -> list[str]:
    return [path.removeprefix(f"{folder}/") for path in paths]
