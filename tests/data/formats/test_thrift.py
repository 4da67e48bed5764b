import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.data.formats.thrift import (
    I64,
    STRUCT,
    CutShort,
    Reader,
    ThriftError,
    integer,
    member,
    read_struct,
    write_struct,
)

ints = st.integers(-(2**63), 2**63 - 1)


def structs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[int, Any]]:
    return st.integers(1, 14).flatmap(
        lambda most: st.dictionaries(st.integers(1, most), values, max_size=6)
    )


VALUES = st.recursive(
    ints | ints.map(I64) | st.binary(max_size=200),
    lambda inner: (
        structs(inner)
        | st.lists(st.binary(max_size=3), min_size=1, max_size=20)
        | st.lists(structs(inner), min_size=1, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(structs(VALUES), st.binary(max_size=5))
def test_what_is_written_is_read(fields: dict[int, Any], behind: bytes) -> None:
    data = write_struct(fields)
    assert read_struct(data + behind) == (fields, len(data))
    assert read_struct(behind + data, len(behind)) == (fields, len(behind) + len(data))


@settings(max_examples=40)
@given(structs(VALUES), st.data())
def test_a_part_of_a_struct_is_cut_short(fields: dict[int, Any], data: st.DataObject) -> None:
    whole = write_struct(fields)
    with pytest.raises(CutShort):
        read_struct(whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(max_examples=40)
@given(st.binary(max_size=100))
def test_no_bytes_do_more_than_raise_an_error(data: bytes) -> None:
    try:
        _, end = read_struct(data)
    except ThriftError:
        return
    reader = Reader(data)
    reader.skip(STRUCT)
    assert reader.position == end


@settings(max_examples=40)
@given(structs(VALUES))
def test_a_struct_can_be_passed_over(fields: dict[int, Any]) -> None:
    reader = Reader(write_struct(fields))
    reader.skip(STRUCT)
    assert reader.position == len(reader.data)


def test_types_and_field_numbers_that_are_not_written_here() -> None:
    fields = {
        1: (b"\x11", True),  # a boolean is its type
        2: (b"\x12", False),
        3: (b"\x13\x07", b"\x07"),  # a byte
        4: (b"\x17" + struct.pack("<d", math.pi), math.pi),
        5: (b"\x19\x31\x01\x02\x01", [True, False, True]),
        6: (b"\x1a\x25\x02\x04", [1, 2]),  # a set
        7: (b"\x1b\x02\x85\x01a\x02\x01b\x04", [(b"a", 1), (b"b", 2)]),
        8: (b"\x1b\x00", []),  # a map of nothing has no types
        9: (b"\x1d" + bytes(range(16)), bytes(range(16))),
        300: (b"\x05\xd8\x04\x0a", 5),  # a number of its own, not a step
        301: (b"\x19\xf5\x10" + b"\x02" * 16, [1] * 16),  # a long list
    }
    data = b"".join(part for part, _ in fields.values()) + b"\0"
    assert read_struct(data) == (
        {number: value for number, (_, value) in fields.items()},
        len(data),
    )
    reader = Reader(data)
    reader.skip(STRUCT)
    assert reader.position == len(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x1c" * 40 + b"\0" * 41, "nested too deeply"),
        (b"\x19\x19" + b"\x19" * 60, "nested too deeply"),
        (b"\x1e\0", "there is no type 14"),
        (b"\x16" + b"\xff" * 12 + b"\0", "more than 64 bits"),
        (b"\x18\xff\xff\xff\xff\x0fab\0", "the data end"),
        (b"\x19\xf5\xff\xff\xff\xff\x0f\0", "the data end"),
    ],
)
def test_what_is_no_struct(data: bytes, message: str) -> None:
    with pytest.raises(ThriftError, match=message):
        read_struct(data)


def test_what_is_passed_over_may_not_be_nested_without_end() -> None:
    for data in (b"\x1c" * 3000, b"\x19" * 3000, b"\x1b\x01\xcc" * 3000):
        with pytest.raises(ThriftError, match="nested too deeply"):
            Reader(data).skip(STRUCT)


def test_a_field_must_have_its_type() -> None:
    fields = {1: 5, 2: {}, 3: True}
    assert integer(fields, 1) == 5
    assert integer(fields, 9, 7) == 7
    assert member(fields, 2) == {}
    for number in (2, 3, 9):
        with pytest.raises(ThriftError, match=f"field {number}"):
            integer(fields, number)
    for number in (1, 9):
        with pytest.raises(ThriftError, match=f"field {number}"):
            member(fields, number)
