"""Pages too large to hold: unpacked as a stream, and cut into texts as they arrive.

Some writers put a whole row group into one page of a gigabyte. That is bearable where the codec is
one that unpacks as it goes (zstd, gzip, none) and the texts simply follow each other, each behind
its length. A snappy, lz4 or brotli page is one block, and a dictionary is needed whole.
"""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from diffurefill.data.formats.footer import Chunk, Damage, TooLarge
from diffurefill.data.formats.pages import (
    DATA_V2,
    MAX_PAGE_BYTES,
    PLAIN,
    RLE,
    Page,
    decoding_errors,
)
from diffurefill.data.storage.files import RandomAccess

_BLOCK_BYTES = 1 << 20
_STREAMED = {0: None, 2: "gzip", 6: "zstd"}
"""The format's number of a codec, and pyarrow's name."""


def can_stream(chunk: Chunk, page: Page) -> bool:
    return chunk.codec in _STREAMED and page.encoding == PLAIN and page.level_encoding == RLE


def read_values(file: RandomAccess, chunk: Chunk, page: Page) -> Iterator[bytes | None]:
    """The values of a page that can be streamed; memory does not grow with the page.

    Raises Damage, and TooLarge where a single text is.
    """
    body = _Range(file, page.body_offset, page.end)
    with decoding_errors():
        yield from _unpacked_values(io.BufferedReader(body, _BLOCK_BYTES), chunk, page)
    if page.crc not in (None, body.crc):
        raise Damage(f"the page at byte {page.offset} does not have its checksum")


def _unpacked_values(body: io.BufferedReader, chunk: Chunk, page: Page) -> Iterator[bytes | None]:
    levels = _Feed(body, page.level_bytes).take(page.level_bytes)
    codec = _STREAMED[chunk.codec] if page.is_compressed else None
    stream = body if codec is None else pa.CompressedInputStream(pa.PythonFile(body), codec)
    feed = _Feed(stream, page.unpacked_bytes - page.level_bytes)
    if chunk.leaf.max_definition and page.kind != DATA_V2:
        levels = feed.take(int.from_bytes(feed.take(4), "little"))
    present = _is_present(levels) if chunk.leaf.max_definition else itertools.repeat(True)
    for is_present in itertools.islice(present, page.num_values):
        yield feed.take(int.from_bytes(feed.take(4), "little")) if is_present else None
    # That there were so many values, whoever asked for them has seen.
    if feed.remaining or stream.read(1):
        raise Damage(f"the page at byte {page.offset} has another size than its header says")


class _Range(io.RawIOBase):
    """The bytes [start, end) of a file, once, with the CRC-32 of what was read."""

    def __init__(self, file: RandomAccess, start: int, end: int) -> None:
        super().__init__()
        self._file, self._position, self._end = file, start, end
        self.crc = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview | bytearray, /) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._end - self._position)
        data = self._file.read_at(self._position, wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        self.crc = zlib.crc32(data, self.crc)
        return len(data)


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Feed:
    """Exactly so many bytes of a stream as are asked for; `remaining` may yet be taken."""

    def __init__(self, stream: _Stream, remaining: int) -> None:
        self._stream, self.remaining = stream, remaining
        self._block, self._position = b"", 0

    def take(self, length: int) -> bytes:
        """Raises Damage for more than remain, TooLarge for more than memory is meant to hold."""
        end = self._position + length
        if end > len(self._block):
            self._fill(length)
            end = length
        taken = self._block[self._position : end]
        self._position = end
        self.remaining -= length
        return taken

    def _fill(self, length: int) -> None:
        """Let the block begin at the position, and hold `length` bytes or more."""
        if length > self.remaining:
            raise Damage("a text goes on behind the end of its page")
        if length > MAX_PAGE_BYTES:
            raise TooLarge(f"a text of {length / 1e6:,.0f} MB")
        parts = [self._block[self._position :]]
        available = len(parts[0])
        while available < length:
            # No more than remains: what follows may be another stream's.
            block = self._stream.read(min(_BLOCK_BYTES, self.remaining - available))
            if not block:
                raise Damage("a page ends too early")
            parts.append(block)
            available += len(block)
        self._block, self._position = b"".join(parts), 0


def _is_present(levels: bytes) -> Iterator[bool]:
    """Definition levels 0 and 1, one bit wide, in Parquet's hybrid of run lengths and bits.

    Ends with `levels`, which may hold a few more than there are values.
    """
    position = 0
    try:
        while position < len(levels):
            header = shift = 0
            while (byte := levels[position]) > 127:
                header |= (byte & 127) << shift
                position, shift = position + 1, shift + 7
            header |= byte << shift
            position += 1
            if header & 1:
                for byte in levels[position : position + (header >> 1)]:
                    yield from (bool(byte >> bit & 1) for bit in range(8))
                position += header >> 1
            else:
                yield from itertools.repeat(levels[position] == 1, header >> 1)
                position += 1
    except IndexError:
        raise Damage("definition levels end too early") from None
