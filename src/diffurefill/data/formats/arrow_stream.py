"""Arrow files as `datasets` saves them to disk: an IPC stream, read one record batch at a time.

A batch is a message that stands by itself behind the schema, so its first byte is a mark.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa

from diffurefill.config import UserError
from diffurefill.data.formats.marks import Mark
from diffurefill.data.storage.files import RandomAccess, Stream

_BUFFER_BYTES = 1 << 20
MAX_BATCH_BYTES = 256 << 20
"""A batch must be held whole, and twice while it is decoded."""


def require_column(file: RandomAccess, column: str) -> None:
    """Raises UserError where the file is no Arrow stream or has no text column of that name."""
    _schema(_buffered(file), file.uri, column)


def read_rows(file: RandomAccess, column: str, start: Mark) -> Iterator[tuple[str | None, Mark]]:
    """The rows from `start` on, each with the mark right after it."""
    source = _buffered(file)
    schema = _schema(source, file.uri, column)
    if start.offset:
        source.seek(start.offset)
    row, offset = start.offset_row, start.offset or source.tell()
    while (batch := _next_batch(source, schema, file)) is not None:
        texts = _texts(batch.column(column))
        for place in range(max(start.row - row, 0), len(texts)):
            yield texts[place], Mark(row=row + place + 1, offset=offset, offset_row=row)
        row, offset = row + len(texts), source.tell()


def _buffered(file: RandomAccess) -> io.BufferedReader:
    return io.BufferedReader(Stream(file), _BUFFER_BYTES)


def _schema(source: io.BufferedReader, uri: str, column: str) -> pa.Schema:
    try:
        schema = pa.ipc.read_schema(pa.ipc.read_message(source))
    except (pa.ArrowException, EOFError, OSError) as error:
        raise UserError(f"{uri} is no Arrow stream as `datasets` saves it: {error}") from None
    if column not in schema.names:
        raise UserError(
            f"{uri} has no column {column!r}: set the source's text_column to one of "
            f"{', '.join(schema.names)}"
        )
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(
            f"column {column!r} of {uri} holds {kind}, not text: set the source's text_column to a "
            "string column"
        )
    return schema


def _next_batch(
    source: io.BufferedReader, schema: pa.Schema, file: RandomAccess
) -> pa.RecordBatch | None:
    """The batch that begins here; None at the stream's end."""
    head = source.peek(8)[:8]
    if not head or head == b"\xff\xff\xff\xff\0\0\0\0":
        return None
    at = source.tell()
    try:
        message = pa.ipc.read_message(source)
        if message.body.size > MAX_BATCH_BYTES:
            raise UserError(
                f"{file.uri} has a record batch of {message.body.size / 1e6:,.0f} MB: save it "
                "again with smaller ones (writer_batch_size), or as Parquet"
            )
        return pa.ipc.read_record_batch(message, schema)
    except (pa.ArrowException, EOFError, OSError) as error:
        raise UserError(f"{file.uri} is damaged at byte {at}, fetch it again: {error}") from None


def _texts(column: pa.Array) -> list[str | None]:
    """As strings, with U+FFFD for bytes that are no UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        large = pa.types.is_large_string(column.type)
        raw = column.view(pa.large_binary() if large else pa.binary()).to_pylist()
        return [None if text is None else text.decode("utf-8", "replace") for text in raw]
