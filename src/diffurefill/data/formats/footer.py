"""A Parquet file's footer: its columns, and where the pages of each lie.

Read here and not by pyarrow, which ends the process where a footer is damaged in certain ways (an
unknown codec) or a column encrypted, and which lets the schema that Arrow may have stored beside
the file's own decide how a column is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from diffurefill.data.formats.thrift import (
    LIST,
    STRUCT,
    Reader,
    ThriftError,
    integer,
    member,
    read_struct,
)
from diffurefill.data.storage.files import RandomAccess

MAGIC = b"PAR1"
_ENCRYPTED_MAGIC = b"PARE"
_TAIL_BYTES = 1 << 16
"""Read at once; most footers are smaller."""
_MAX_FOOTER_BYTES = 256_000_000
_MAX_DEPTH = 32
_OLD_WRITERS_ERROR_BYTES = 100
"""Writers of 2013 forgot the dictionary page's header in the size of a chunk."""

# Numbers of the Parquet format.
BYTE_ARRAY = 6
REQUIRED, OPTIONAL, REPEATED = 0, 1, 2
_TYPES = ("boolean", "int32", "int64", "int96", "float", "double", "binary", "fixed-size binary")
_CONVERTED_TEXTS = (0, 4, 19)  # UTF-8, enum, JSON
_LOGICAL_TEXTS = (1, 4, 12)  # the same, in the union that took over
_CONVERTED_LIST = _LOGICAL_LIST = 3
_CODECS = ("none", "snappy", "gzip", "lzo", "brotli", "lz4 in its old framing", "zstd", "lz4")


class Damage(Exception):
    """The data contradict themselves; the message says how."""


class Encrypted(Exception):
    """The data cannot be read without a key."""


class TooLarge(Exception):
    """The data would need too much memory; the message says what, as in "a page of 90 MB"."""


class Leaf(NamedTuple):
    """A column as Parquet has it; a nested column is several. Levels are the format's."""

    path: tuple[str, ...]
    kind: str
    """ "text", or the name of another type."""
    max_definition: int
    max_repetition: int
    in_list: bool
    """The column as a whole is a list."""

    @property
    def is_flat(self) -> bool:
        return len(self.path) == 1 and self.max_repetition == 0


class Chunk(NamedTuple):
    """A leaf of one row group; `start` and `end` are offsets in the file, the end as it is said."""

    row_group: int
    num_rows: int
    num_values: int
    """Nulls count. Of a flat column: the same as num_rows."""
    start: int
    end: int
    codec: int
    unpacked_bytes: int
    leaf: Leaf

    @property
    def limit(self) -> int:
        """No page ends behind it."""
        return self.end + _OLD_WRITERS_ERROR_BYTES

    @property
    def codec_name(self) -> str:
        return _CODECS[self.codec] if 0 <= self.codec < len(_CODECS) else f"codec {self.codec}"


class Footer:
    def __init__(self, data: bytes) -> None:
        """Raises Damage."""
        self._data = data
        try:
            self._num_rows, schema, first, self.num_row_groups = _read_head(data)
            self.leaves = list(_leaves(iter(schema)))
        except (ThriftError, IndexError) as error:
            raise Damage(_in_footer(error)) from None
        self._positions = [first]

    @cached_property
    def columns(self) -> dict[str, list[int]]:
        """The names by which people know columns, and the numbers of their leaves."""
        found: dict[str, list[int]] = {}
        for number, leaf in enumerate(self.leaves):
            found.setdefault(leaf.path[0], []).append(number)
        return found

    def num_rows(self, row_group: int) -> int:
        """Raises Damage."""
        return self._row_group(row_group)[0]

    def chunks(self, leaf: int) -> list[Chunk]:
        """Of every row group. Raises Encrypted, and Damage where they do not add up to the file.

        Takes 0.3 s for ten thousand chunks of all columns together; `chunk` finds one sooner.
        """
        chunks = [self.chunk(row_group, leaf) for row_group in range(self.num_row_groups)]
        if sum(chunk.num_rows for chunk in chunks) != self._num_rows:
            raise Damage("its row groups do not have the file's rows")
        return chunks

    def chunk(self, row_group: int, leaf: int) -> Chunk:
        """Raises Damage, Encrypted."""
        num_rows, columns = self._row_group(row_group)
        column = columns[leaf]
        try:
            if not isinstance(column, dict):
                raise ThriftError("a column has no place")
            if 8 in column or 9 in column:
                raise Encrypted
            if 1 in column:
                raise Damage("its columns are in another file")
            return _chunk(member(column, 3), row_group, num_rows, self.leaves[leaf])
        except ThriftError as error:
            raise Damage(_in_footer(error)) from None

    def _row_group(self, row_group: int) -> tuple[int, list[Any]]:
        """The number of rows, and the columns' structs; row groups before it are passed over."""
        try:
            while len(self._positions) <= row_group:
                reader = Reader(self._data, self._positions[-1])
                reader.skip(STRUCT)
                self._positions.append(reader.position)
            fields, _ = read_struct(self._data, self._positions[row_group])
            num_rows, columns = integer(fields, 3), fields.get(1)
            if num_rows < 0 or not isinstance(columns, list) or len(columns) != len(self.leaves):
                raise ThriftError("a row group does not have the file's columns")
        except (ThriftError, IndexError) as error:
            raise Damage(_in_footer(error)) from None
        return num_rows, columns


def read_footer(file: RandomAccess) -> Footer:
    """Raises Damage, Encrypted."""
    tail = file.read_at(max(file.size - _TAIL_BYTES, 0), min(_TAIL_BYTES, file.size))
    if tail.endswith(_ENCRYPTED_MAGIC):
        raise Encrypted
    if not tail.endswith(MAGIC):
        raise Damage("it does not end as a Parquet file does")
    size, place = int.from_bytes(tail[-8:-4], "little"), len(tail) - 8
    if not 0 < size <= min(file.size - 8 - len(MAGIC), _MAX_FOOTER_BYTES):
        raise Damage(f"a footer of {size} bytes")
    return Footer(
        tail[place - size : place] if size <= place else file.read_at(file.size - 8 - size, size)
    )


def _in_footer(error: Exception) -> str:
    # Where data end, Python's IndexError says nothing of use.
    return f"in its footer, {error if isinstance(error, ThriftError) else 'the data end'}"


def _read_head(data: bytes) -> tuple[int, list[Any], int, int]:
    """Number of rows, the schema's elements, where the first row group is, and how many are."""
    reader = Reader(data)
    fields: dict[int, Any] = {}
    number, kind = reader.field(0)
    while kind and number != 4:
        fields[number] = reader.value(kind)
        number, kind = reader.field(number)
    length, element = reader.list_head() if kind == LIST else (0, None)
    schema = fields.get(2)
    if not isinstance(schema, list) or element is None or (length and element != STRUCT):
        raise ThriftError("the schema or the row groups are missing")
    return integer(fields, 3), schema, reader.position, length


def _leaves(elements: Iterator[Any]) -> Iterator[Leaf]:
    """The leaves of the schema's tree, whose `elements` come in depth-first order."""
    root = _element(elements)
    for _ in range(integer(root, 5, 0)):
        top = _element(elements)
        logical = top.get(10)
        is_list = integer(top, 3, REQUIRED) == REPEATED or top.get(6) == _CONVERTED_LIST
        is_list |= isinstance(logical, dict) and _LOGICAL_LIST in logical
        yield from _leaves_below(elements, top, Leaf((), "", 0, 0, is_list))


def _leaves_below(elements: Iterator[Any], element: dict[int, Any], above: Leaf) -> Iterator[Leaf]:
    repetition = integer(element, 3, REQUIRED)
    leaf = above._replace(
        path=(*above.path, element[4].decode("utf-8", "replace")),
        kind=_kind(element) if 1 in element else "",
        max_definition=above.max_definition + (repetition != REQUIRED),
        max_repetition=above.max_repetition + (repetition == REPEATED),
    )
    if len(leaf.path) > _MAX_DEPTH:
        raise ThriftError("the schema is nested too deeply")
    if leaf.kind:
        yield leaf
    for _ in range(integer(element, 5, 0)):
        yield from _leaves_below(elements, _element(elements), leaf)


def _element(elements: Iterator[Any]) -> dict[int, Any]:
    element = next(elements, None)
    if not isinstance(element, dict) or not isinstance(element.get(4), bytes):
        raise ThriftError("the schema is no tree")
    return element


def _kind(element: dict[int, Any]) -> str:
    number, logical = integer(element, 1), element.get(10)
    is_text = element.get(6) in _CONVERTED_TEXTS
    is_text |= isinstance(logical, dict) and any(kind in logical for kind in _LOGICAL_TEXTS)
    if number == BYTE_ARRAY and is_text:
        return "text"
    return _TYPES[number] if 0 <= number < len(_TYPES) else f"type {number}"


def _chunk(metadata: dict[int, Any], row_group: int, num_rows: int, leaf: Leaf) -> Chunk:
    start, dictionary = integer(metadata, 9), integer(metadata, 11, 0)
    # Some writers give 0, or nothing, and begin with the dictionary page at data_page_offset.
    if 0 < dictionary < start:
        start = dictionary
    size, num_values = integer(metadata, 7), integer(metadata, 5)
    # A column without values has no place.
    if min(size, num_values) < 0 or (num_values and start < len(MAGIC)):
        raise Damage("its footer names an impossible place")
    if leaf.is_flat and num_values != num_rows:
        raise Damage("its footer counts other values than rows")
    end = start + size
    codec, unpacked_bytes = integer(metadata, 4), integer(metadata, 6)
    return Chunk(row_group, num_rows, num_values, start, end, codec, unpacked_bytes, leaf)
