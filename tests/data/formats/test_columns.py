"""Schemas that pyarrow does not write; those that it does are read in test_parquet.py."""

from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.data.formats.columns import Column, find_column
from diffurefill.data.formats.footer import Damage, Footer
from diffurefill.data.formats.thrift import I64, write_struct

REQUIRED, OPTIONAL, REPEATED = 0, 1, 2
Element = dict[int, Any]


def text(name: str, repetition: int = OPTIONAL) -> list[Element]:
    return [{1: 6, 3: repetition, 4: name.encode(), 6: 0}]


def number(name: str) -> list[Element]:
    return [{1: 2, 3: OPTIONAL, 4: name.encode()}]


def group(
    name: str, *children: list[Element], repetition: int = OPTIONAL, **kind: Any
) -> list[Element]:
    """`kind`: `converted` (3 is a list), or `logical`."""
    own = {3: repetition, 4: name.encode(), 5: len(children)}
    own |= {6: kind["converted"]} if "converted" in kind else {}
    own |= {10: kind["logical"]} if "logical" in kind else {}
    return [own, *(element for child in children for element in child)]


def footer(*columns: list[Element]) -> Footer:
    elements = [element for column in columns for element in column]
    root = {4: b"schema", 5: len(columns)}
    return Footer(write_struct({1: 2, 2: [root, *elements], 3: I64(0), 4: [{3: I64(0)}]}))


def found(*columns: list[Element]) -> Column | None:
    try:
        return find_column(footer(*columns), "a.parquet", "text")
    except UserError as error:
        assert "not text" in str(error)  # noqa: PT017
        return None


REPEATED_TEXT = group("list", text("element"), repetition=REPEATED)


@pytest.mark.parametrize(
    "column",
    [
        group("text", REPEATED_TEXT, converted=3),
        group("text", REPEATED_TEXT, logical={3: {}}),
        group("text", text("array", REPEATED), converted=3),
        text("text", REPEATED),
    ],
)
def test_lists_of_texts(column: list[Element]) -> None:
    assert found(number("n"), column) == Column("texts", 1)


def test_lists_of_messages() -> None:
    message = [text("role"), text("content")]
    new = group("list", group("element", *message), repetition=REPEATED)
    assert found(group("text", new, converted=3)) == Column("messages", 1)
    old = group("array", *message, repetition=REPEATED)
    assert found(group("text", old, converted=3)) == Column("messages", 1)
    assert found(group("text", *message, repetition=REPEATED)) is None  # a list without its group
    deeper = group("array", group("a", text("content")), text("content"), repetition=REPEATED)
    assert found(group("text", deeper, converted=3)) == Column("messages", 1)


@pytest.mark.parametrize(
    "column",
    [
        group("text", text("content", REPEATED)),  # a struct
        group("text", REPEATED_TEXT),
        group("text", group("array", text("array", REPEATED), repetition=REPEATED), converted=3),
        group("text", group("array", text("a"), text("b"), repetition=REPEATED), converted=3),
        group("text", group("a", text("content"))),
        group(
            "text",
            group("list", group("element", group("a", text("content"))), repetition=REPEATED),
            converted=3,
        ),
        group("text", group("list", number("element"), repetition=REPEATED), converted=3),
        group(
            "text", group("key_value", text("key"), text("value"), repetition=REPEATED), converted=1
        ),
        [{1: 6, 3: OPTIONAL, 4: b"text"}],  # bytes
        [{1: 7, 2: 4, 3: OPTIONAL, 4: b"text", 6: 0}],  # of a fixed size
        [{1: 99, 3: OPTIONAL, 4: b"text"}],
    ],
)
def test_what_is_no_text(column: list[Element]) -> None:
    assert found(column) is None


@pytest.mark.parametrize("logical", [1, 4, 12])
def test_the_newer_way_to_say_text(logical: int) -> None:
    assert found([{1: 6, 3: OPTIONAL, 4: b"text", 10: {logical: {}}}]) == Column("text", 0)


def test_levels() -> None:
    leaves = footer(
        text("a", REQUIRED), text("b"), group("c", REPEATED_TEXT, converted=3), text("d", REPEATED)
    ).leaves
    assert [(leaf.max_definition, leaf.max_repetition) for leaf in leaves] == [
        *((0, 0), (1, 0)),
        *((3, 1), (1, 1)),
    ]
    assert [leaf.is_flat for leaf in leaves] == [True, True, False, False]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "missing"),
        ([{4: b"schema", 5: 1}], "no tree"),
        ([{4: b"schema", 5: 2**31 - 1}, *text("a")], "no tree"),
        ([{4: b"schema", 5: 1}, {1: 6, 3: 0}], "no tree"),
        ([{5: 1}, *text("a")], "no tree"),
        ([{4: b"s", 5: 1}, *[{3: 1, 4: b"x", 5: 1}] * 90], "nested too deeply"),
        ([{4: b"s", 5: 1}, {1: b"?", 3: 1, 4: b"x"}], "field 1"),
    ],
)
def test_schemas_that_cannot_be(schema: list[Element], message: str) -> None:
    fields: dict[int, Any] = {1: 2, 3: I64(0), 4: [{3: I64(0)}]}
    with pytest.raises(Damage, match=message):
        Footer(write_struct(fields | ({2: schema} if schema else {})))
