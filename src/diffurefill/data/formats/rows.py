"""A unit read row by row, from any mark on. Rows come in the file's order and are never too long
to hold: pyarrow's pages, a line of JSONL, a few paragraphs of plain text, a part of a module.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import BinaryIO, cast

import pyarrow as pa

from diffurefill.config import UserError
from diffurefill.data.formats import arrow_stream, parquet
from diffurefill.data.formats.marks import Mark
from diffurefill.data.storage.files import Stream, open_file
from diffurefill.data.units import Unit

MAX_DOCUMENT_CHARS = 200_000
"""Longer documents are cut: some tokenizers grow in time or memory on very long strings."""
PART_CHARS = 8_000
"""Plain text files and modules longer than this are cut at blank lines or definitions."""

_BUFFER_BYTES = 1 << 20


def read_rows(unit: Unit, text_column: str, start: Mark) -> Iterator[tuple[str | None, Mark]]:
    """The unit's rows from `start` on, each with the mark right after it; None is a null.

    Bytes that are no UTF-8 come as U+FFFD: one bad byte must not end a run of weeks. Raises
    UserError where the file is damaged or lacks the text column.
    """
    file = open_file(unit.file.uri)
    try:
        match unit.kind:
            case "parquet":
                groups = None if unit.row_group is None else [unit.row_group]
                yield from parquet.read_rows(file, text_column, groups, start)
            case "arrow":
                yield from arrow_stream.read_rows(file, text_column, start)
            case "jsonl":
                yield from _read_jsonl(Stream(file, start.offset), unit, text_column, start)
            case "text":
                yield from _read_text(_buffered(Stream(file, start.offset)), start)
            case "python":
                text = file.read_at(0, file.size).decode("utf-8", "replace")
                yield from _skipped(group(top_level_parts(text), PART_CHARS), start)
    finally:
        file.close()


def cut_long(text: str) -> Iterator[str]:
    """The documents that a row holds: one, unless it is longer than a document may be."""
    for start in range(0, len(text), MAX_DOCUMENT_CHARS):
        yield text[start : start + MAX_DOCUMENT_CHARS]


def _buffered(stream: io.RawIOBase) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(stream, _BUFFER_BYTES))


def _skipped(rows: Iterable[str], start: Mark) -> Iterator[tuple[str, Mark]]:
    """Rows that can only be reached from the file's start."""
    for number, row in islice(enumerate(rows), start.row, None):
        yield row, Mark(row=number + 1)


# --- JSON lines ----------------------------------------------------------------------------------


def _read_jsonl(
    stream: Stream, unit: Unit, text_column: str, start: Mark
) -> Iterator[tuple[str | None, Mark]]:
    """A blank line is a row without text, so that row numbers are line numbers."""
    if unit.packing is None:
        position = start.offset
        for number, line in enumerate(_buffered(stream), start.row):
            position += len(line)
            text = _text_of(line, text_column, f"{unit.file.uri}:{number + 1}")
            yield text, Mark(row=number + 1, offset=position, offset_row=number + 1)
        return
    try:
        lines = pa.CompressedInputStream(pa.PythonFile(stream), unit.packing)
        for number, line in enumerate(io.BufferedReader(lines, _BUFFER_BYTES)):
            if number >= start.row:
                text = _text_of(line, text_column, f"{unit.file.uri}:{number + 1}")
                yield text, Mark(row=number + 1)
    except OSError as error:
        raise UserError(f"{unit.file.uri} is damaged, fetch it again: {error}") from None


def _text_of(line: bytes, text_column: str, where: str) -> str | None:
    # A byte order mark begins a file, and a line where such files were joined.
    line = line.removeprefix(codecs.BOM_UTF8)
    if not line or line.isspace():
        return None
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where} is no JSON object: write one object a line")
    if text_column not in record:
        raise UserError(
            f"{where} has no field {text_column!r}: set the source's text_column to one of "
            f"{', '.join(record)}"
        )
    text = record[text_column]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{where}: field {text_column!r} is no text: set the source's text_column to a field "
            "that holds strings"
        )
    # JSON can escape half of a surrogate pair, which no UTF-8 text can hold.
    return text and text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- plain text ----------------------------------------------------------------------------------


def _read_text(file: BinaryIO, start: Mark) -> Iterator[tuple[str, Mark]]:
    """Paragraphs joined up to PART_CHARS. A mark is a part's first byte."""
    number, offset, held, size, num_bytes = start.row, start.offset, [], 0, 0
    for paragraph, length in _paragraphs(file, at_start=start.offset == 0):
        if held and size + len(paragraph) > PART_CHARS:
            number, offset = number + 1, offset + num_bytes
            yield "".join(held), Mark(row=number, offset=offset, offset_row=number)
            held, size, num_bytes = [], 0, 0
        held.append(paragraph)
        size, num_bytes = size + len(paragraph), num_bytes + length
    if held:
        number, offset = number + 1, offset + num_bytes
        yield "".join(held), Mark(row=number, offset=offset, offset_row=number)


def _paragraphs(file: BinaryIO, *, at_start: bool) -> Iterator[tuple[str, int]]:
    """(text, bytes read) of the lines up to and with the next blank one; bounded in memory
    whatever the line lengths."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, num_bytes = "", 0
    while line := file.readline(MAX_DOCUMENT_CHARS):
        num_bytes += len(line)
        part = decoder.decode(line.removeprefix(codecs.BOM_UTF8) if at_start else line)
        at_start = False
        text += part.replace("\r\n", "\n")
        is_between_characters = not decoder.getstate()[0]
        if (part.isspace() or len(text) >= MAX_DOCUMENT_CHARS) and is_between_characters:
            yield text, num_bytes
            text, num_bytes = "", 0
    if num_bytes:
        yield text + decoder.decode(b"", final=True), num_bytes


# --- the Python library --------------------------------------------------------------------------


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
