"""What a source's paths stand for: files cut into units, the shares that slots own.

A *unit* is a file, or one row group of a Parquet file where there are few files.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from diffurefill.config import Source, UserError
from diffurefill.data.formats import parquet
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.rows import read_rows
from diffurefill.data.storage.files import list_files, looks_like_text, open_file
from diffurefill.data.storage.listing import File
from diffurefill.data.units import Unit, kind_of

PYTHON = "python:"
UNITS_PER_SLOT = 4
"""From so many units a slot on, slots share units out; below it, they share rows out."""

_NOT_LIBRARY_TEXT = frozenset(
    {"site-packages", "dist-packages", "__pycache__"}
    | {"test", "tests", "idle_test"}  # wrong code on purpose, and long tables of cases
    | {"encodings", "pydoc_data"}  # two megabytes of generated tables, which nobody wrote
)
# Written when the interpreter was built: they differ between machines of one version.
_BUILD_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class SourceText:
    """A source with its files found."""

    source: Source
    units: tuple[Unit, ...]

    @property
    def name(self) -> str:
        return self.source.name

    @cached_property
    def facts(self) -> list[list[object]]:
        """What the units are, not where they lie."""
        return [[unit.name, unit.file.size] for unit in self.units]


def open_source(source: Source, num_slots: int) -> SourceText:
    """The units of `source`, in an order that does not depend on the machine.

    Raises UserError for a missing path, a file that cannot be read or lacks the text column.
    """
    units = open_files(source)
    if source.paths == (PYTHON,):
        return SourceText(source, tuple(units))
    if len(units) >= UNITS_PER_SLOT * num_slots:
        # With many files, one look into the first must do: a footer costs two requests on a hub.
        _looked_into(units[0], source.text_column)
        # Any file may be taken for plain text; on this machine a look at its start costs little.
        for unit in units:
            if "://" not in unit.file.uri:
                require_text(unit)
        return SourceText(source, tuple(units))
    found = [part for unit in units for part in _looked_into(unit, source.text_column)]
    return SourceText(source, tuple(found))


def open_files(source: Source) -> list[Unit]:
    """Every file of the source as a unit, not looked into."""
    if PYTHON in source.paths and len(source.paths) > 1:
        raise UserError(f"{PYTHON} must be the only path of a data source: make it a second source")
    if source.paths == (PYTHON,):
        return _library_units()
    # A file named by two paths is still one file: its documents must not come twice.
    files = {_identity(file): file for path in source.paths for file in list_files(path)}
    return [Unit(file, kind_of(file)) for file in files.values()]


def _identity(file: File) -> str:
    """One for a local file, however its path is spelt."""
    return file.uri if "://" in file.uri else os.path.realpath(file.uri)


def _looked_into(unit: Unit, text_column: str) -> list[Unit]:
    """The row groups of a Parquet file, or the unit itself; a wrong column or a file that is no
    text shows here, before training starts."""
    if unit.kind == "parquet":
        file = open_file(unit.file.uri)
        try:
            groups = parquet.count_row_groups(file, text_column)
            return [replace(unit, row_group=group) for group in range(groups)]
        finally:
            file.close()
    require_text(unit)
    next(read_rows(unit, text_column, Mark()), None)
    return [unit]


def require_text(unit: Unit) -> None:
    """Raises UserError for what would be read as plain text and does not begin as UTF-8."""
    if unit.kind != "text":
        return
    file = open_file(unit.file.uri)
    try:
        if not looks_like_text(file):
            raise UserError(
                f"{unit.file.uri} is no UTF-8 text: a data source takes .parquet, .jsonl and plain "
                "text files"
            )
    finally:
        file.close()


def _library_units() -> list[Unit]:
    root = Path(sysconfig.get_path("stdlib"))
    version = f"python-{platform.python_version()}"
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not any(
            part in _NOT_LIBRARY_TEXT or part.startswith(_BUILD_PREFIXES) for part in inside.parts
        ):
            name = f"{version}/{inside.as_posix()}"
            found.append(Unit(File(str(path), name, path.stat().st_size), "python"))
    return found
