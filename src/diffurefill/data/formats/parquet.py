"""Parquet text columns read in bounded memory, from any row on: a page, never a row group.

A flat column is read page by page (pages.py), and each row comes with a Mark that names its page:
reading that begins again there costs one page. Nested columns (lists of texts, chat messages) have
no such marks; they are read by pyarrow, and begun again by passing over the rows before.

Readers that decode row groups need gigabytes where this needs a page: results/reader.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import pyarrow.parquet as pq

from diffurefill.config import UserError
from diffurefill.data.formats import giant
from diffurefill.data.formats.columns import Column, decode, find_column, texts
from diffurefill.data.formats.footer import Chunk, Damage, Encrypted, Footer, TooLarge, read_footer
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.pages import (
    BATCH_ROWS,
    LARGE_PAGE_BYTES,
    Page,
    PageReader,
    UnreadableHeader,
    check_size,
    decoding_errors,
    walk,
)
from diffurefill.data.storage.files import RandomAccess, Stream

_BUFFER_BYTES = 1 << 20

Row = tuple[str | None, Mark]


def count_row_groups(file: RandomAccess, column: str) -> int:
    """Raises UserError where `file` is no Parquet file or has no text column of that name.

    Looks at the whole footer; reading looks at one row group's part only.
    """
    footer = open_footer(file)
    found = find_column(footer, file.uri, column)
    with errors_of(file):
        return len(footer.chunks(found.leaf))


def read_rows(
    file: RandomAccess, column: str, row_groups: Sequence[int] | None, start: Mark
) -> Iterator[Row]:
    """The texts of these row groups (None: all) from `start` on, each with the Mark after it.

    Row groups come in rising order; those before that of `start` are passed over. The Mark after
    the last row of a group is (row_group, its number of rows, 0, 0). A null is None; invalid UTF-8
    is decoded with U+FFFD.

    Raises UserError for damaged or encrypted data, for a `start` that is none of this file's, and
    for pages too large to read in bounded memory.
    """
    footer = open_footer(file)
    found = find_column(footer, file.uri, column)
    for group in range(footer.num_row_groups) if row_groups is None else row_groups:
        if not 0 <= group < footer.num_row_groups:
            raise UserError(f"{file.uri} has no row group {group}: it is not the file it was")
        if group >= start.row_group:
            first = start if group == start.row_group else Mark(group)
            with errors_of(file, group):
                yield from _read_group(file, footer, found, first)


def open_footer(file: RandomAccess) -> Footer:
    """Raises UserError for a damaged or encrypted one."""
    with errors_of(file):
        return read_footer(file)


@contextmanager
def errors_of(file: RandomAccess, row_group: int | None = None) -> Generator[None]:
    """Turns what can be wrong with a file's data into a UserError that names it."""
    where = file.uri if row_group is None else f"row group {row_group} of {file.uri}"
    try:
        yield
    except Damage as error:
        what = "is no Parquet file, or" if row_group is None else "is"
        raise UserError(
            f"{where} {what} damaged; fetch the file again or leave it out: {error}"
        ) from None
    except Encrypted:
        raise UserError(f"{where} is encrypted; decrypt the file or leave it out") from None
    except TooLarge as error:
        raise UserError(
            f"{where} cannot be read in bounded memory: it has {error}. Write the file anew with "
            'pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=10_000, '
            "data_page_size=1 << 20), or leave it out"
        ) from None


def _read_group(file: RandomAccess, footer: Footer, column: Column, start: Mark) -> Iterator[Row]:
    group, num_rows = start.row_group, footer.num_rows(start.row_group)
    if not 0 <= start.offset_row <= start.row <= num_rows:
        raise UserError(
            f"row group {group} of {file.uri} has {num_rows} rows, and reading was to go on at row "
            f"{start.row}: it is not the file it was"
        )
    if start.row == num_rows:
        return
    chunk = footer.chunk(group, column.leaf)
    if column.shape == "text":
        try:
            for row in _read_by_pages(file, chunk, start):
                start = row[1]
                yield row
            return
        except UnreadableHeader:
            pass  # the format may have grown, and pyarrow with it
    yield from _read_by_passing_over(file, chunk, start)


# --- flat columns: by pages -----------------------------------------------------------------------


def _read_by_pages(file: RandomAccess, chunk: Chunk, start: Mark) -> Iterator[Row]:
    reader = PageReader(file, chunk)
    for run in reader.runs(start.row, start.offset, start.offset_row):
        first = run[0]
        if first.memory_bytes > LARGE_PAGE_BYTES and giant.can_stream(chunk, first):
            values = giant.read_values(file, chunk, first)
        else:
            values = reader.decode(run)
        yield from _rows(chunk, run, values, start.row)


def _rows(
    chunk: Chunk, run: list[Page], values: Iterator[bytes | None], start_row: int
) -> Iterator[Row]:
    """Rows of the pages of `run` from `start_row` on; `values` are all their values."""
    group, row = chunk.row_group, run[0].first_row
    for page in run:
        end_row = page.end_row
        after = (page.end, end_row) if end_row < chunk.num_rows else (0, 0)
        for row, value in zip(range(page.first_row + 1, end_row + 1), values, strict=False):
            if row > start_row:
                place = after if row == end_row else (page.offset, page.first_row)
                yield decode(value), Mark(group, row, *place)
    if row != run[-1].end_row or next(values, run) is not run:
        raise Damage("its pages hold another number of texts than their headers say")


# --- everything else: by pyarrow ------------------------------------------------------------------


def _read_by_passing_over(file: RandomAccess, chunk: Chunk, start: Mark) -> Iterator[Row]:
    check_first_pages(file, chunk)
    row = 0
    with decoding_errors():
        # pre_buffer is written out: its default differs between pyarrow versions, and True silently
        # cancels buffer_size.
        parquet = pq.ParquetFile(
            Stream(file),
            pre_buffer=False,
            buffer_size=_BUFFER_BYTES,
            page_checksum_verification=True,
        )
        for batch in parquet.iter_batches(
            batch_size=BATCH_ROWS,
            row_groups=[chunk.row_group],
            columns=[".".join(chunk.leaf.path)],
            use_threads=False,
        ):
            first, row = row, row + len(batch)
            if row > start.row:
                for place, text in enumerate(texts(batch.column(0)), first + 1):
                    if place > start.row:
                        yield text, Mark(chunk.row_group, place)
    if row != chunk.num_rows:
        raise Damage(f"{row} rows are there of {chunk.num_rows}")


def check_first_pages(file: RandomAccess, chunk: Chunk) -> None:
    """Raises TooLarge for large pages at the chunk's start: all are made by the same rule."""
    try:
        for page in itertools.islice(walk(file, chunk), 2):
            check_size(page)
    except UnreadableHeader:
        return
