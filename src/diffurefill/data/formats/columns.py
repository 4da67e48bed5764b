"""Which columns of a Parquet file hold text, and how nested values become documents."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from diffurefill.config import UserError
from diffurefill.data.formats.footer import Footer


class Column(NamedTuple):
    """A column of documents: each a text, a list of texts, or a list of structs with `content`."""

    shape: Literal["text", "texts", "messages"]
    leaf: int
    """Number of the Parquet column that holds the texts."""


def find_column(footer: Footer, uri: str, name: str) -> Column:
    """The column called `name`; raises UserError where there is none, or where it is not text."""
    if column := _column(footer, name):
        return column
    texts = [other for other in footer.columns if _column(footer, other)]
    advice = f"set text_column to one of: {', '.join(texts)}" if texts else "none is text"
    if name not in footer.columns:
        there = ", ".join(footer.columns)
        raise UserError(f"{uri} has no column {name!r}; {advice} (columns: {there})")
    leaves = [footer.leaves[leaf] for leaf in footer.columns[name]]
    kinds = ", ".join(" ".join(["/".join(leaf.path[1:]), leaf.kind]).strip() for leaf in leaves)
    raise UserError(f"column {name!r} of {uri} holds {kinds}, not text; {advice}")


def _column(footer: Footer, name: str) -> Column | None:
    numbers = footer.columns.get(name, [])
    leaves = {n: footer.leaves[n] for n in numbers if footer.leaves[n].kind == "text"}
    for number, leaf in leaves.items():
        if leaf.is_flat:
            return Column("text", number)
    lists = {
        n: leaf.path for n, leaf in leaves.items() if leaf.in_list and leaf.max_repetition == 1
    }
    # The list itself takes two steps of the path, or one in older files.
    contents = [n for n, path in lists.items() if path[-1] == "content" and len(path) in (3, 4)]
    if contents:
        # A `content` inside another field of the struct has a longer path.
        return Column("messages", min(contents, key=lambda n: len(lists[n])))
    if len(numbers) == 1 and lists and len(lists[numbers[0]]) <= 3:
        return Column("texts", numbers[0])
    return None


def texts(array: pa.Array) -> list[str | None]:
    """One text, or None, for each row of `array`.

    The texts of a list are joined by newlines, the contents of messages by blank lines; items that
    are null are left out.
    """
    if not hasattr(array.type, "value_type") or isinstance(array, pa.DictionaryArray):
        return _decoded(array)
    lengths = pc.call_function("list_value_length", [array]).to_pylist()
    items, separator = array.flatten(), "\n"  # without what may lie under null rows
    if isinstance(items, pa.StructArray):
        # Nothing but `content` was read; flatten() counts the nulls of the structs.
        items, separator = items.flatten()[0], "\n\n"
    values = iter(_decoded(items))
    rows = [None if n is None else [next(values) for _ in range(n)] for n in lengths]
    return [
        None if row is None else separator.join(t for t in row if t is not None) for row in rows
    ]


def decode(value: bytes | None) -> str | None:
    """Invalid UTF-8 becomes U+FFFD: one bad byte does not end a run."""
    return None if value is None else value.decode("utf-8", "replace")


def _decoded(array: pa.Array) -> list[str | None]:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    return [decode(value) for value in array.cast(pa.large_binary()).to_pylist()]
