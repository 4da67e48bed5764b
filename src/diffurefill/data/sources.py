"""What a source's name stands for: files cut into units, and a unit read as a stream of texts.

A *unit* is a file, or one row group of a Parquet file. Texts come out in the file's order, never
null or blank, at most `MAX_DOCUMENT_CHARS` long.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from diffurefill.config import UserError
from diffurefill.data import parquet

PYTHON = "python:"
MAX_DOCUMENT_CHARS = 200_000
"""Longer documents are cut: some tokenizers grow in time or memory on very long strings."""
PART_CHARS = 8_000
"""Plain text files and modules longer than this are cut at blank lines or definitions."""

_TEXT_SUFFIXES = frozenset({".txt", ".md", ".py", ".rst"})
_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_PACKED_SUFFIXES = frozenset({".xz", ".gz", ".bz2", ".zst", ".zip", ".tar"})
_NOT_LIBRARY_TEXT = frozenset(
    {"site-packages", "dist-packages", "__pycache__"}
    | {"test", "tests", "idle_test"}  # wrong code on purpose, and long tables of cases
    | {"encodings", "pydoc_data"}  # two megabytes of generated tables, which nobody wrote
)
# Written when the interpreter was built: they differ between machines of one version.
_BUILD_PREFIXES = ("_sysconfigdata", "config-")
_SNIFF_BYTES = 1 << 16


@dataclass(frozen=True)
class Unit:
    """`name`, `size_bytes` and `row_group` say what it is on every machine; `path` where it is."""

    path: Path
    kind: Literal["parquet", "jsonl", "text", "python"]
    name: str
    size_bytes: int
    row_group: int = 0


def list_units(source: str, text_column: str) -> list[Unit]:
    """The units of one source, in an order that does not depend on the machine.

    Raises UserError for a missing path, a glob without match, a file that is no text or lacks the
    text column.
    """
    if source == PYTHON:
        return _library_units()
    path = Path(source)
    if path.exists():
        files = _folder_files(path) if path.is_dir() else [path]
    elif any(mark in source for mark in "*?["):
        matches = [Path(match) for match in sorted(glob.glob(source, recursive=True))]
        files = [f for m in matches for f in (_folder_files(m) if m.is_dir() else [m])]
        if not files:
            raise UserError(f"no file matches the data source {source}: check the pattern")
    else:
        raise UserError(f"no such file or folder: {source} (data.sources)")
    return [unit for file in files for unit in _file_units(file, text_column)]


def read_texts(unit: Unit, text_column: str) -> Iterator[str]:
    """The documents of one unit as a stream; raises UserError where the file is damaged."""
    match unit.kind:
        case "parquet":
            texts = parquet.read_row_group(unit.path, unit.row_group, text_column)
        case "jsonl":
            texts = _read_jsonl(unit.path, text_column)
        case "text":
            texts = _read_text(unit.path)
        case "python":
            texts = _read_module(unit.path)
    for text in texts:
        if text and not text.isspace():
            for start in range(0, len(text), MAX_DOCUMENT_CHARS):
                yield text[start : start + MAX_DOCUMENT_CHARS]


# --- from names to units -------------------------------------------------------------------------


def _library_units() -> list[Unit]:
    root = Path(sysconfig.get_path("stdlib"))
    version = f"python-{platform.python_version()}"
    units = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if _is_library(name))
        for name in sorted(name for name in files if name.endswith(".py") and _is_library(name)):
            path = Path(folder, name)
            label = f"{version}/{path.relative_to(root).as_posix()}"
            units.append(Unit(path, "python", label, path.stat().st_size))
    return units


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY_TEXT and not name.startswith(_BUILD_PREFIXES)


def _folder_files(folder: Path) -> list[Path]:
    """Every readable file below `folder`; of a data set in hub layout its train split alone."""
    for base in (folder / "data", folder):
        train = sorted(base.glob("train-*.parquet"))
        if train:
            return train
    files = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith((".", "__pycache__")):
            continue
        if entry.is_dir():
            files += [] if entry.is_symlink() else _folder_files(entry)
        elif entry.suffix.lower() in _JSON_SUFFIXES | {".parquet"} or (
            entry.suffix.lower() in _TEXT_SUFFIXES and _starts_as_text(entry)
        ):
            files.append(entry)
    return files


def _file_units(path: Path, text_column: str) -> list[Unit]:
    suffix, size_bytes = path.suffix.lower(), path.stat().st_size
    if suffix == ".parquet":
        num_row_groups = parquet.count_row_groups(path, text_column)
        return [Unit(path, "parquet", path.name, size_bytes, g) for g in range(num_row_groups)]
    if suffix in _PACKED_SUFFIXES:
        raise UserError(f"{path} is compressed: unpack it first and name the unpacked file")
    if suffix in _JSON_SUFFIXES:
        unit = Unit(path, "jsonl", path.name, size_bytes)
        next(read_texts(unit, text_column), None)  # a wrong column shows before training starts
        return [unit]
    if not _starts_as_text(path):
        raise UserError(
            f"{path} is no UTF-8 text: data.sources takes .parquet, .jsonl and plain text files"
        )
    return [Unit(path, "text", path.name, size_bytes)]


def _starts_as_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_SNIFF_BYTES)
    try:
        # Not final: the sniffed bytes may end within a character.
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False


# --- from units to texts -------------------------------------------------------------------------


def _read_jsonl(path: Path, text_column: str) -> Iterator[str | None]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # covers UnicodeDecodeError
                raise UserError(f"{path}:{number} is not valid JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number} is no JSON object: write one object a line")
            if text_column not in record:
                raise UserError(
                    f"{path}:{number} has no field {text_column!r}: set data.text_column to one of "
                    f"{', '.join(record)}"
                )
            text = record[text_column]
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"{path}:{number}: field {text_column!r} is no text: set data.text_column to "
                    "a field that holds strings"
                )
            # JSON can escape half of a surrogate pair, which no UTF-8 text can hold.
            yield text and text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_text(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from group(_paragraphs(file), PART_CHARS)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 throughout ({error}): convert it") from None


def _read_module(path: Path) -> Iterator[str]:
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        return  # a few modules declare another encoding; they are left out
    yield from group(top_level_parts(text), PART_CHARS)


def _paragraphs(file: TextIO) -> Iterator[str]:
    """Lines up to and with the next blank one; memory stays bounded whatever the line lengths."""
    lines: list[str] = []
    num_chars = 0
    while line := file.readline(MAX_DOCUMENT_CHARS):
        lines.append(line)
        num_chars += len(line)
        if line.isspace() or num_chars >= MAX_DOCUMENT_CHARS:
            yield "".join(lines)
            lines, num_chars = [], 0
    if lines:
        yield "".join(lines)


def top_level_parts(text: str) -> list[str]:
    """A module cut before each top-level definition; decorators and comments right above stay on.

    A rule on lines, not a parse: 20 times cheaper, and a cut that a string literal misleads costs
    nothing but a less natural boundary. The parts joined are `text`.
    """
    lines = text.splitlines(keepends=True)
    cuts = [0]
    head: int | None = None  # first of the comment and decorator lines directly above
    decorated = False  # a decorator may run over several lines
    for number, line in enumerate(lines):
        if line.startswith(("def ", "class ", "async def ")):
            cuts.append(number if head is None else head)
            head, decorated = None, False
        elif line.startswith(("#", "@")):
            head = number if head is None else head
            decorated = decorated or line[0] == "@"
        elif not decorated:
            head = None
    bounds = zip(cuts, [*cuts[1:], len(lines)], strict=True)
    return ["".join(lines[start:end]) for start, end in bounds if start < end]


def group(parts: Iterable[str], max_chars: int) -> Iterator[str]:
    """Consecutive parts joined up to `max_chars`; a longer part stands alone."""
    held: list[str] = []
    num_chars = 0
    for part in parts:
        if held and num_chars + len(part) > max_chars:
            yield "".join(held)
            held, num_chars = [], 0
        held.append(part)
        num_chars += len(part)
    if held:
        yield "".join(held)
