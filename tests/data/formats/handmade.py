"""Parquet files put together by hand, for what no writer here writes, and files in memory."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffurefill.data.formats import parquet
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.parquet import Row
from diffurefill.data.formats.thrift import I64, write_struct

START = Mark()
OPTIONAL_TEXT = {1: 6, 3: 1, 4: b"text", 6: 0}
REQUIRED_TEXT = {1: 6, 3: 0, 4: b"text", 6: 0}
NONE, GZIP = 0, 2
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8


SMALL_PAGES: dict[str, Any] = {"data_page_size": 600, "write_batch_size": 8}
ENCODINGS: dict[str, dict[str, Any]] = {
    "plain": {"use_dictionary": False},
    "dictionary": {},
    "dictionary, then plain": {"dictionary_pagesize_limit": 500},
    "delta length": {
        "use_dictionary": False,
        "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"},
    },
    "delta": {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
}


@dataclass
class MemoryFile:
    """See RandomAccess; counts what is read."""

    content: bytes
    uri: str = "memory.parquet"
    reads: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.content)

    def read_at(self, offset: int, length: int) -> bytes:
        assert offset >= 0
        assert length >= 0
        data = self.content[offset : offset + length]
        self.reads.append(len(data))
        return data

    def close(self) -> None:
        pass


def write(texts: Any, **settings: Any) -> MemoryFile:
    """A file that pyarrow writes, with one column `text`; `texts` may be an array or a table."""
    table = texts if isinstance(texts, pa.Table) else pa.table({"text": texts})
    sink = io.BytesIO()
    pq.write_table(table, sink, **settings)
    return MemoryFile(sink.getvalue())


def read(file: MemoryFile, start: Mark = START, column: str = "text") -> list[Row]:
    return list(parquet.read_rows(file, column, None, start))


def texts_of(file: MemoryFile, start: Mark = START, column: str = "text") -> list[str | None]:
    return [text for text, _ in read(file, start, column)]


def some_texts(count: int) -> list[str | None]:
    """Of 0 to 50 words, some null, some twice."""
    return [
        None if n % 11 == 0 else " ".join(f"wörd{n % 70 * k}" for k in range(n * 7 % 51))
        for n in range(count)
    ]


# --- pages ----------------------------------------------------------------------------------------


def plain(texts: Iterable[str | bytes]) -> bytes:
    values = [text.encode() if isinstance(text, str) else text for text in texts]
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def levels(present: Sequence[bool]) -> bytes:
    """Definition levels as runs of one."""
    return b"".join(bytes([1 << 1, is_present]) for is_present in present)


def sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def page(header: dict[int, Any], body: bytes) -> bytes:
    return write_struct(header) + body


def data_page(num_values: int, body: bytes, encoding: int = PLAIN, **changes: int) -> bytes:
    """Version 1, not compressed. `changes`: `unpacked`, `packed`, `levels` of the header."""
    header: dict[int, Any] = {1: 0, 2: len(body), 3: changes.get("packed", len(body))}
    header[2] = changes.get("unpacked", len(body))
    header[5] = {1: num_values, 2: encoding, 3: changes.get("levels", RLE), 4: RLE}
    return page(header, body)


def gzip_page(num_values: int, body: bytes, unpacked: int | None = None) -> bytes:
    packed = gzip.compress(body)
    header: dict[int, Any] = {1: 0, 2: len(body) if unpacked is None else unpacked, 3: len(packed)}
    header[5] = {1: num_values, 2: PLAIN, 3: RLE, 4: RLE}
    return page(header, packed)


def page_left_as_it_is(num_values: int, num_nulls: int, level_bytes: bytes, body: bytes) -> bytes:
    """Version 2, not compressed although the column is."""
    size = len(level_bytes + body)
    member = {1: num_values, 2: num_nulls, 3: num_values, 4: PLAIN, 5: len(level_bytes), 6: 0}
    header = write_struct({1: 3, 2: size, 3: size, 8: member})
    # write_struct knows no booleans. The member's field 7 is false: one byte, of type 2.
    return header[:-2] + b"\x12" + header[-2:] + level_bytes + body


def dictionary_page(num_values: int, body: bytes) -> bytes:
    return page({1: 2, 2: len(body), 3: len(body), 7: {1: num_values, 2: PLAIN}}, body)


def file_of(
    groups: Sequence[tuple[int, Sequence[bytes]]],
    *,
    schema: Sequence[dict[int, Any]] = (REQUIRED_TEXT,),
    codec: int = NONE,
    num_rows: int | None = None,
    **metadata: Any,
) -> MemoryFile:
    """A file of one column. `groups`: number of rows, and pages. `metadata`: fields of the column's
    entry that are to be others, by number, as in `m9=I64(4)`; None takes one away."""
    content, entries = b"PAR1", []
    for rows, pages in groups:
        start, size = len(content), sum(map(len, pages))
        column = {1: 6, 2: [PLAIN], 3: [b"text"], 4: codec, 5: I64(rows), 6: I64(1 << 40)}
        column |= {7: I64(size), 9: I64(start)}
        column |= {int(name[1:]): value for name, value in metadata.items()}
        column = {number: value for number, value in column.items() if value is not None}
        content += b"".join(pages)
        entries.append({1: [{2: I64(0), 3: column}], 2: I64(size), 3: I64(rows)})
    total = sum(rows for rows, _ in groups) if num_rows is None else num_rows
    root = {4: b"schema", 5: 1}
    footer = write_struct({1: 2, 2: [root, *schema], 3: I64(total), 4: entries})
    return MemoryFile(content + footer + struct.pack("<I", len(footer)) + b"PAR1")
