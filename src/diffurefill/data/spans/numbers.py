"""Character spans of a text -> a span number for each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def span_numbers(
    text: str,
    ids: Sequence[int] | np.ndarray,
    spans: Sequence[tuple[int, int]],
    byte_ends: np.ndarray | None,
) -> np.ndarray:
    """int32 (n,) for the n tokens `ids` of `text`: 0 outside, 1, 2 ... for spans, left to right.

    `spans` are character ranges, sorted and disjoint; `byte_ends` (n,) says where each token ends
    in the UTF-8 bytes of `text`. Every token that shares a byte with a span belongs to it. Spans
    that share a token get one number: half of a token cannot be masked. A span that no token
    reaches gets none. Without `byte_ends` (the tokenizer changed the text) there are no spans.
    """
    numbers = np.zeros(len(ids), dtype=np.int32)
    if byte_ends is None or not spans:
        return numbers
    if len(byte_ends) != len(ids):
        raise ValueError(f"{len(ids)} tokens, but {len(byte_ends)} ends of tokens")
    bounds = _byte_offsets(text, np.asarray(spans, dtype=np.int64))
    token_starts = np.concatenate(([0], byte_ends))[:-1]
    first = np.searchsorted(byte_ends, bounds[:, 0], side="right")
    last = np.searchsorted(token_starts, bounds[:, 1], side="left")
    reached = first < last
    first, last = first[reached], last[reached]
    is_new = np.concatenate(([True], first[1:] >= last[:-1]))[: len(first)]
    lengths = last - first
    skipped = first - (np.cumsum(lengths) - lengths)  # tokens outside, before each span
    tokens = np.repeat(skipped, lengths) + np.arange(lengths.sum())
    numbers[tokens] = np.repeat(np.cumsum(is_new), lengths)
    return numbers


def _byte_offsets(text: str, characters: np.ndarray) -> np.ndarray:
    """The UTF-8 byte at which each of these characters of `text` begins."""
    if text.isascii():
        return characters
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.concatenate(([0], np.cumsum(sizes)))[characters]
