# ruff: noqa: RUF001 (Cyrillic and dashes are meant)
"""Spans of characters to numbers of tokens, against a loop over all tokens and spans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.data.spans.numbers import span_numbers

Span = tuple[int, int]


def plain(text: str, spans: list[Span], byte_ends: list[int]) -> list[int]:
    """Token by token; spans that share a token are one."""
    numbers, number = [0] * len(byte_ends), 0
    for start, end in spans:
        low, high = len(text[:start].encode()), len(text[:end].encode())
        tokens = [
            i
            for i, token_end in enumerate(byte_ends)
            if token_end > low and (byte_ends[i - 1] if i else 0) < high
        ]
        if tokens:
            number += not numbers[tokens[0]]
            for i in tokens:
                numbers[i] = number
    return numbers


def numbers(text: str, spans: list[Span], pieces: list[str]) -> list[int]:
    """For tokens that are `pieces` of `text`."""
    ends = np.cumsum([len(piece.encode()) for piece in pieces])
    found = span_numbers(text, range(len(pieces)), spans, ends)
    assert found.dtype == np.int32
    return found.tolist()


def test_a_token_that_overlaps_a_span_belongs_to_it():
    pieces = ["In", " Ne", "w", " York", ",", " ", "1", "96", "9."]
    text = "".join(pieces)
    spans = [(3, 11), (13, 17)]
    assert [text[a:b] for a, b in spans] == ["New York", "1969"]
    assert numbers(text, spans, pieces) == [0, 1, 1, 1, 0, 0, 2, 2, 2]


def test_characters_of_several_bytes_are_counted_in_bytes():
    pieces = ["в", " Ро", "сс", "ии", " 😀", "7"]
    text = "".join(pieces)
    assert numbers(text, [(2, 8), (text.index("7"), len(text))], pieces) == [0, 1, 1, 1, 0, 2]


def test_a_token_of_some_bytes_of_a_character_belongs_to_the_span_of_the_character():
    text = "a €"
    ends = np.array([1, 2, 3, 4, 5])  # the euro sign is three tokens
    assert span_numbers(text, range(5), [(2, 3)], ends).tolist() == [0, 0, 1, 1, 1]


def test_spans_that_share_a_token_get_one_number():
    pieces = ["4", ", 1", "961", " x", " 7"]
    assert numbers("".join(pieces), [(0, 1), (3, 7), (10, 11)], pieces) == [1, 2, 2, 0, 3]
    assert numbers("".join(pieces), [(0, 2), (3, 7), (10, 11)], pieces) == [1, 1, 1, 0, 2]


def test_spans_behind_the_last_token_get_no_number():
    assert span_numbers("a B c D", range(2), [(2, 3), (6, 7)], np.array([1, 4])).tolist() == [0, 1]
    assert span_numbers("a B", [], [(2, 3)], np.array([], dtype=np.int64)).tolist() == []


def test_without_known_ends_there_are_no_spans():
    assert span_numbers("Ab", [5, 6], [(0, 1)], None).tolist() == [0, 0]
    assert span_numbers("Ab", [5, 6], [], np.array([1, 2])).tolist() == [0, 0]


def test_ends_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="3 tokens, but 2 ends"):
        span_numbers("Ab", [5, 6, 7], [(0, 1)], np.array([1, 2]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[Span], list[int]]:
    text = draw(st.text(alphabet="aB1 é–€日😀\u0301", max_size=30))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12, unique=True).map(sorted))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    num_bytes = len(text.encode())
    # Any bytes may be a token, several ends may be equal (a token without bytes), and the last
    # tokens may be missing.
    ends = draw(st.lists(st.integers(0, num_bytes), max_size=20).map(sorted))
    return text, spans, ends


@given(cases())
def test_it_is_what_a_plain_loop_finds(case: tuple[str, list[Span], list[int]]):
    text, spans, ends = case
    found = span_numbers(text, ends, spans, np.array(ends, dtype=np.int64)).tolist()
    assert found == plain(text, spans, ends)
    assert sorted(set(found) - {0}) == list(range(1, max(found, default=0) + 1))
