"""What a Parquet file's pages mean for reading it: shown before a run is planned on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from diffurefill.data.formats import giant
from diffurefill.data.formats.columns import find_column
from diffurefill.data.formats.footer import Chunk
from diffurefill.data.formats.pages import (
    DATA,
    DATA_V2,
    DICTIONARY,
    LARGE_PAGE_BYTES,
    MAX_PAGE_BYTES,
    Page,
    UnreadableHeader,
    walk,
)
from diffurefill.data.formats.parquet import errors_of, open_footer
from diffurefill.data.storage.files import RandomAccess

# Fitted to VmHWM of processes that read files of pages from 1 to 60 MB; see results/reader.json.
_BASE_MB, _PAGES_MB, _STREAM_MB = 80, 30, 25
_DATA_FACTOR, _DICTIONARY_FACTOR = 4.2, 3.0

Way = Literal["pages", "stream", "passing over", "refused"]


@dataclass(frozen=True)
class PageFacts:
    """Bytes are of the text column, unpacked. Pages are those of the first row group with rows."""

    shape: str
    """`text`; `texts`, a list of texts; `messages`, a list of structs with a text `content`."""
    num_rows: int
    num_row_groups: int
    codecs: tuple[str, ...]
    largest_row_group_bytes: int
    num_pages: int
    largest_page_bytes: int
    dictionary_bytes: int
    way: Way
    """`pages`: page by page. `stream`: large pages are unpacked as a stream. `passing over`: rows
    before the place where reading goes on are read again. `refused`: a page is too large."""
    peak_mb: int
    """Estimate of the memory of a process that reads one row at a time, and nothing else."""
    notes: tuple[str, ...]


def describe(file: RandomAccess, column: str) -> PageFacts:
    """Reads the footer and the page headers of one row group; raises UserError as a reader would.

    A header takes a read of 16 kB: a row group of 2 GB in pages of 1 MB, two thousand of them.
    """
    footer = open_footer(file)
    found = find_column(footer, file.uri, column)
    with errors_of(file):
        chunks = footer.chunks(found.leaf)
    first = next((chunk for chunk in chunks if chunk.num_values), None)
    pages, is_whole = _pages(file, first) if first else ([], True)
    data = [page for page in pages if page.kind in (DATA, DATA_V2)]
    dictionary = max((page.memory_bytes for page in pages if page.kind == DICTIONARY), default=0)
    by_pages = found.shape == "text" and is_whole
    held = [page for page in data if not (by_pages and first and _is_streamed(first, page))]
    largest_held = max((page.memory_bytes for page in held), default=0)
    way: Way = "pages" if by_pages else "passing over"
    if len(held) < len(data):
        way = "stream"
    if max(dictionary, largest_held) > MAX_PAGE_BYTES:
        way = "refused"
    megabytes = _STREAM_MB if way == "stream" else _PAGES_MB
    megabytes += (_DATA_FACTOR * largest_held + _DICTIONARY_FACTOR * dictionary) / 1e6
    codecs = tuple(sorted({chunk.codec_name for chunk in chunks}))
    return PageFacts(
        shape=found.shape,
        num_rows=sum(chunk.num_rows for chunk in chunks),
        num_row_groups=len(chunks),
        codecs=codecs,
        largest_row_group_bytes=max((chunk.unpacked_bytes for chunk in chunks), default=0),
        num_pages=len(data),
        largest_page_bytes=max((page.memory_bytes for page in data), default=0),
        dictionary_bytes=dictionary,
        way=way,
        peak_mb=round(_BASE_MB + megabytes),
        notes=tuple(_notes(way, found.shape, codecs)),
    )


def _pages(file: RandomAccess, chunk: Chunk) -> tuple[list[Page], bool]:
    """The chunk's pages as far as their headers can be read here, and whether these are all."""
    pages = []
    with errors_of(file, chunk.row_group):
        try:
            pages.extend(walk(file, chunk))
        except UnreadableHeader:
            return pages, False
    return pages, True


def _is_streamed(chunk: Chunk, page: Page) -> bool:
    return page.memory_bytes > LARGE_PAGE_BYTES and giant.can_stream(chunk, page)


def _notes(way: Way, shape: str, codecs: tuple[str, ...]) -> Iterator[str]:
    if way == "refused":
        yield (
            "a page is too large to hold, and cannot be unpacked as a stream: write the file anew "
            "with smaller pages"
        )
    if way == "stream":
        yield "reading goes on by unpacking a large page from its start"
    if way == "passing over":
        yield "reading goes on by passing over the rows before, from the row group's start"
    if shape == "texts":
        yield "the texts of a list are joined by newlines"
    if shape == "messages":
        yield "the contents of a list's messages are joined by blank lines"
    if len(codecs) > 1:
        yield f"row groups differ in compression: {', '.join(codecs)}"
