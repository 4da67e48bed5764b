"""The pages of one column of one row group: found by their headers, decoded a few at a time.

A column chunk is an optional dictionary page and then data pages, each a Thrift header and a body.
Nothing but the headers says where a page begins and how many rows it has, so they are walked, and
whole pages that make about a megabyte are decoded by pyarrow from a *virtual file*: a Parquet file
in memory that holds the dictionary page, these pages as they are, and a footer written here. Memory
is bounded by a page, and reading may begin again at any page.

This is for flat columns, where a value of a page is a row; the headers of others can be walked too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from diffurefill.config import UserError
from diffurefill.data.formats.footer import (
    BYTE_ARRAY,
    MAGIC,
    OPTIONAL,
    REQUIRED,
    Chunk,
    Damage,
    TooLarge,
)
from diffurefill.data.formats.thrift import (
    I64,
    CutShort,
    ThriftError,
    integer,
    member,
    read_struct,
    write_struct,
)
from diffurefill.data.storage.files import RandomAccess

# Arrow's own allocator keeps what it once had: spec data.md 1 measured a quarter less without it.
pa.set_memory_pool(pa.system_memory_pool())

RUN_BYTES = 1 << 20
"""Pages are decoded together until they are so large, unpacked."""
LARGE_PAGE_BYTES = 8_000_000
"""Larger pages are decoded alone, and as a stream where that can be (giant.py)."""
MAX_PAGE_BYTES = 64_000_000
"""Larger pages are never held in memory; decoding one takes four times its size."""
BATCH_ROWS = 256

# Numbers of the Parquet format.
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
PLAIN, RLE = 0, 3
_DICTIONARY_ENCODINGS = (2, 8)

_HEADER_WINDOWS = (1 << 14, 1 << 18, 1 << 24)
"""Bytes read in the hope of a whole header: some embed the page's least and greatest text."""


class UnreadableHeader(Damage):
    """A page header of a kind that is not known here."""


class Page(NamedTuple):
    """What a page header says. `first_row` counts from the row group's start."""

    kind: int
    offset: int
    body_offset: int
    body_bytes: int
    unpacked_bytes: int
    first_row: int
    num_values: int = 0
    num_rows: int | None = None
    """Version 2 only."""
    encoding: int = PLAIN
    level_encoding: int = RLE
    level_bytes: int = 0
    """Version 2: bytes of levels in front of the values, never compressed."""
    is_compressed: bool = True
    crc: int | None = None
    """CRC-32 of the body."""

    @property
    def end(self) -> int:
        return self.body_offset + self.body_bytes

    @property
    def end_row(self) -> int:
        return self.first_row + (self.num_values if self.kind in (DATA, DATA_V2) else 0)

    @property
    def memory_bytes(self) -> int:
        return max(self.body_bytes, self.unpacked_bytes)


def walk(file: RandomAccess, chunk: Chunk, offset: int = 0, row: int = 0) -> Iterator[Page]:
    """Every page from `offset` (0: the chunk's start) on, where row `row` begins.

    Reads headers only. Ends with the chunk's last value; raises Damage where pages and their count
    do not fit, or where a header says what cannot be.
    """
    offset = offset or chunk.start
    if not chunk.start <= offset < chunk.limit:
        raise Damage(f"there is no page at byte {offset}")
    while row < chunk.num_values:
        try:
            page = _checked(_read_header(file, chunk, offset, row), chunk, file.size)
        except UnreadableHeader:
            if offset < min(chunk.end, file.size):
                raise
            raise Damage(f"{row} rows are there of {chunk.num_values}") from None
        yield page
        offset, row = page.end, page.end_row


class PageReader:
    """Runs of pages of one chunk, and their values."""

    def __init__(self, file: RandomAccess, chunk: Chunk) -> None:
        self._file, self._chunk = file, chunk
        self._dictionary: bytes | None = None

    def runs(self, row: int, offset: int = 0, offset_row: int = 0) -> Iterator[list[Page]]:
        """The data pages that hold row `row` or a later one, in runs to be decoded together.

        The walk begins at byte `offset` (0: the chunk's start), where row `offset_row` begins. A
        page of more than LARGE_PAGE_BYTES is a run of its own. Raises Damage.
        """
        run: list[Page] = []
        size = 0
        for page in walk(self._file, self._chunk, offset, offset_row):
            if page.kind not in (DATA, DATA_V2) or page.end_row <= row:
                continue
            is_large = page.memory_bytes > LARGE_PAGE_BYTES
            if run and is_large:
                yield run
                run, size = [], 0
            run.append(page)
            size += page.unpacked_bytes
            if is_large or size >= RUN_BYTES:
                yield run
                run, size = [], 0
        if run:
            yield run

    def decode(self, run: list[Page]) -> Iterator[bytes | None]:
        """The values of the pages of `run`. Raises Damage, TooLarge."""
        data = pa.BufferReader(self._virtual_file(run))
        with decoding_errors():
            parquet = pq.ParquetFile(data, pre_buffer=False, page_checksum_verification=True)
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                yield from batch.column(0).to_pylist()

    def _virtual_file(self, run: list[Page]) -> bytes:
        parts = [MAGIC]
        if any(page.encoding in _DICTIONARY_ENCODINGS for page in run):
            parts.append(self._read_dictionary())
        data_offset = sum(map(len, parts))
        for page in run:
            check_size(page)
        parts += [_read(self._file, page) for page in run]
        end = sum(map(len, parts))
        num_rows = sum(page.num_values for page in run)
        footer = _footer(self._chunk, num_rows, data_offset, end)
        return b"".join([*parts, footer, len(footer).to_bytes(4, "little"), MAGIC])

    def _read_dictionary(self) -> bytes:
        """The chunk's dictionary page with its header; kept, as every run may need it."""
        if self._dictionary is None:
            chunk = self._chunk
            page = _checked(_read_header(self._file, chunk, chunk.start, 0), chunk, self._file.size)
            if page.kind != DICTIONARY:
                raise Damage("its dictionary page is missing")
            check_size(page)
            self._dictionary = _read(self._file, page)
        return self._dictionary


@contextmanager
def decoding_errors() -> Generator[None]:
    """What pyarrow raises for data that it cannot read becomes Damage."""
    try:
        yield
    except UserError:  # of the file that pyarrow read from; it is a ValueError too
        raise
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        raise Damage(" ".join(str(error).split())) from None


def check_size(page: Page) -> None:
    """Raises TooLarge for a page that must not be held in memory."""
    if page.memory_bytes > MAX_PAGE_BYTES:
        what = "dictionary page" if page.kind == DICTIONARY else "page"
        raise TooLarge(f"a {what} of {page.memory_bytes / 1e6:,.0f} MB")


def _read(file: RandomAccess, page: Page) -> bytes:
    """Header and body."""
    data = file.read_at(page.offset, page.end - page.offset)
    if len(data) < page.end - page.offset:
        raise Damage("the file ends inside a page")
    return data


# --- headers --------------------------------------------------------------------------------------


def _read_header(file: RandomAccess, chunk: Chunk, offset: int, row: int) -> Page:
    for window in _HEADER_WINDOWS:
        data = file.read_at(offset, min(window, chunk.limit - offset))
        try:
            fields, length = read_struct(data)
            return _page(fields, offset, offset + length, row)
        except CutShort as error:
            if len(data) < window:
                raise UnreadableHeader(f"the page header at byte {offset}: {error}") from None
        except ThriftError as error:
            raise UnreadableHeader(f"the page header at byte {offset}: {error}") from None
    raise UnreadableHeader(f"the page header at byte {offset} is longer than {window} bytes")


def _page(fields: dict[int, Any], offset: int, body_offset: int, row: int) -> Page:
    """Field numbers are those of PageHeader and its members in the Parquet format."""
    kind = integer(fields, 1)
    crc = fields.get(4)
    common = {
        "kind": kind,
        "offset": offset,
        "body_offset": body_offset,
        "body_bytes": integer(fields, 3),
        "unpacked_bytes": integer(fields, 2),
        "first_row": row,
        "crc": crc & 0xFFFFFFFF if isinstance(crc, int) else None,
    }
    if kind == DATA:
        header = member(fields, 5)
        return Page(
            **common,
            num_values=integer(header, 1),
            encoding=integer(header, 2),
            level_encoding=integer(header, 3),
        )
    if kind == DICTIONARY:
        header = member(fields, 7)
        return Page(**common, num_values=integer(header, 1), encoding=integer(header, 2))
    if kind == DATA_V2:
        header = member(fields, 8)
        return Page(
            **common,
            num_values=integer(header, 1),
            encoding=integer(header, 4),
            num_rows=integer(header, 3),
            level_bytes=integer(header, 5) + integer(header, 6),
            is_compressed=header.get(7, True) is True,
        )
    return Page(**common)  # an index page, or what a later version of the format adds


def _checked(page: Page, chunk: Chunk, file_bytes: int) -> Page:
    """`page`, if its numbers can be true; memory is set aside by them later."""
    sizes = (page.body_bytes, page.unpacked_bytes, page.num_values, page.level_bytes)
    if min(sizes) < 0 or page.level_bytes > min(page.body_bytes, page.unpacked_bytes):
        raise Damage(f"the page at byte {page.offset} has an impossible size")
    if page.end > chunk.limit or page.end > file_bytes:
        raise Damage(f"the page at byte {page.offset} ends outside of its column")
    if page.unpacked_bytes > max(chunk.unpacked_bytes, MAX_PAGE_BYTES):
        raise Damage(f"the page at byte {page.offset} is larger than its column")
    if page.end_row > chunk.num_values:
        raise Damage(f"its pages hold more than its {chunk.num_values} rows")
    if chunk.leaf.is_flat and page.num_rows not in (None, page.num_values):
        raise Damage(f"the page at byte {page.offset} has other values than rows")
    if page.kind == DICTIONARY:
        # A text takes four bytes or more.
        if page.num_values * 4 > page.unpacked_bytes:
            raise Damage(f"the page at byte {page.offset} is too small for its dictionary")
        if page.offset != chunk.start:
            raise Damage(f"a second dictionary begins at byte {page.offset}")
    return page


# --- the virtual file's footer --------------------------------------------------------------------


def _footer(chunk: Chunk, num_rows: int, data_offset: int, end: int) -> bytes:
    """FileMetaData of one row group of one binary column whose pages lie from byte 4 to `end`.

    Binary, although it holds text: so invalid UTF-8 is left for us to decode.
    """
    root = {4: b"schema", 5: 1}
    leaf = {1: BYTE_ARRAY, 3: OPTIONAL if chunk.leaf.max_definition else REQUIRED, 4: b"text"}
    size = I64(end - len(MAGIC))
    column = {
        1: BYTE_ARRAY,
        2: [PLAIN, RLE],
        3: [b"text"],
        4: chunk.codec,
        5: I64(num_rows),
        6: size,
        7: size,
        9: I64(data_offset),
    }
    if data_offset > len(MAGIC):
        column[11] = I64(len(MAGIC))
    group = {1: [{2: I64(0), 3: column}], 2: size, 3: I64(num_rows)}
    return write_struct({1: 2, 2: [root, leaf], 3: I64(num_rows), 4: [group]})
