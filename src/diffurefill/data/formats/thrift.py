"""Apache Thrift's compact protocol, as far as Parquet's headers and footers need it.

A struct is a dict from field number to value: bool, int, float, bytes, dict or list. Values of
every type can be read, so that a field which nobody here knows is passed over and not misread.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, LIST, _SET, _MAP, STRUCT, _UUID = range(
    1, 14
)
_FIXED_BYTES = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}
_LONG_LIST = 15
_MAX_DEPTH = 16
"""Parquet's headers are four deep, its footers six."""
_MAX_BITS = 64


class ThriftError(ValueError):
    """These bytes are no struct."""


class CutShort(ThriftError):
    """The struct goes on behind the last byte."""


class I64(int):
    """An integer to be written as 64 bits wide; a plain int is written as 32."""


def read_struct(data: bytes, position: int = 0) -> tuple[dict[int, Any], int]:
    """The struct that begins at `position`, and the position behind it.

    Raises CutShort where `data` ends too early, ThriftError where it is no struct.
    """
    reader = Reader(data, position)
    try:
        return reader.struct(), reader.position
    except IndexError:
        raise CutShort("the data end inside a struct") from None


def integer(fields: Mapping[int, Any], number: int, default: int | None = None) -> int:
    """A field that must be an integer; raises ThriftError."""
    value = fields.get(number, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ThriftError(f"field {number} is missing or no number")
    return value


def member(fields: Mapping[int, Any], number: int) -> dict[int, Any]:
    """A field that must be a struct; raises ThriftError."""
    value = fields.get(number)
    if not isinstance(value, dict):
        raise ThriftError(f"field {number} is missing or no struct")
    return value


class Reader:
    """Values one after the other. Methods raise ThriftError, and IndexError where data end."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data, self.position = data, position

    def field(self, last: int) -> tuple[int, int]:
        """Number and type of a struct's next field, after field `last`; (0, 0) at its end."""
        head = self._byte()
        if not head:
            return 0, 0
        if not head & 15:
            raise ThriftError("there is no type 0")
        return last + (head >> 4) if head >> 4 else self._integer(), head & 15

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number, kind = self.field(0)
        while kind:
            # A boolean field has its value in its type.
            is_boolean = kind in (_TRUE, _FALSE)
            fields[number] = kind == _TRUE if is_boolean else self.value(kind, depth + 1)
            number, kind = self.field(number)
        return fields

    def list_head(self) -> tuple[int, int]:
        """Length and element type of a list whose elements follow."""
        head = self._byte()
        length = head >> 4 if head >> 4 != _LONG_LIST else self._varint()
        self._expect(length)
        return length, head & 15

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._integer()
        if kind == _BINARY:
            return self._take(self._varint())
        if depth > _MAX_DEPTH:
            raise ThriftError("structs are nested too deeply")
        if kind == STRUCT:
            return self.struct(depth)
        if kind in (LIST, _SET):
            length, kind = self.list_head()
            return [self.value(kind, depth + 1) for _ in range(length)]
        if kind == _MAP:
            return self._map(depth)
        if kind in (_TRUE, _FALSE):  # in a list
            return self._byte() == _TRUE
        if kind in _FIXED_BYTES:
            data = self._take(_FIXED_BYTES[kind])
            return struct.unpack("<d", data)[0] if kind == _DOUBLE else data
        raise ThriftError(f"there is no type {kind}")

    def skip(self, kind: int) -> None:
        """Pass over a value: several times as fast as reading it."""
        self.position = _skip(self.data, self.position, kind, 0)

    def _map(self, depth: int) -> list[tuple[Any, Any]]:
        length = self._varint()
        self._expect(length)
        kinds = self._byte() if length else 0
        return [
            (self.value(kinds >> 4, depth + 1), self.value(kinds & 15, depth + 1))
            for _ in range(length)
        ]

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) > 127:
            value |= (byte & 127) << shift
            shift += 7
            if shift >= _MAX_BITS:
                raise ThriftError(f"a number has more than {_MAX_BITS} bits")
        return value | byte << shift

    def _byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def _take(self, length: int) -> bytes:
        self._expect(length)
        self.position += length
        return self.data[self.position - length : self.position]

    def _expect(self, length: int) -> None:
        """Every element takes a byte or more: no length is believed that the data cannot hold."""
        if length > len(self.data) - self.position:
            raise CutShort("the data end inside a struct")


def _skip(data: bytes, position: int, kind: int, depth: int) -> int:
    """The position behind a value. Repeats what Reader does for the kinds that a footer is full
    of: it can have a hundred thousand values, of which a few are wanted."""
    if kind in (_I16, _I32, _I64):
        while data[position] > 127:
            position += 1
        return position + 1
    if kind == _BINARY and data[position] < 128:
        return position + 1 + data[position]
    if depth > _MAX_DEPTH:
        raise ThriftError("structs are nested too deeply")
    if kind == STRUCT:
        while head := data[position]:
            position += 1
            if head < 16:  # the field's number follows
                position = _skip(data, position, _I16, depth)
            if head & 15 not in (_TRUE, _FALSE):
                position = _skip(data, position, head & 15, depth + 1)
        return position + 1
    if kind == LIST and data[position] >> 4 != _LONG_LIST:
        head = data[position]
        position += 1
        for _ in range(head >> 4):
            position = _skip(data, position, head & 15, depth + 1)
        return position
    reader = Reader(data, position)
    reader.value(kind, depth)
    return reader.position


def write_struct(fields: Mapping[int, Any]) -> bytes:
    """`fields` as bytes. Values are int, I64, bytes, dict, or a list of one of these."""
    parts = []
    last = 0
    for number, value in sorted(fields.items()):
        parts += [bytes([number - last << 4 | _kind(value)]), _write(value)]
        last = number
    return b"".join(parts) + b"\0"


def _kind(value: Any) -> int:
    if isinstance(value, int):
        return _I64 if isinstance(value, I64) else _I32
    if isinstance(value, bytes):
        return _BINARY
    return STRUCT if isinstance(value, dict) else LIST


def _write(value: Any) -> bytes:
    if isinstance(value, int):
        return _varint(value << 1 if value >= 0 else ~(value << 1))
    if isinstance(value, bytes):
        return _varint(len(value)) + value
    if isinstance(value, dict):
        return write_struct(value)
    head = bytes([_LONG_LIST << 4 | _kind(value[0])])
    return head + _varint(len(value)) + b"".join(map(_write, value))


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
