"""One row while it is filled, and what becomes of it: tokens, documents, spans, short parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from diffurefill.config import DataConfig
from diffurefill.data.cursors import Cursor


class TokenDocument(NamedTuple):
    """`ids` int64 (n,): BOS, tokens, EOS. `find_spans()` gives int32 (n,), 0 where no span is; it
    is called only when a part of the document is placed in a row that wants spans."""

    ids: np.ndarray
    source: str
    before: Cursor
    after: Cursor
    find_spans: Callable[[], np.ndarray]

    def cursor_at(self, token: int) -> Cursor:
        """The cursor once `token` of the document's tokens are consumed."""
        return self.after if token == len(self.ids) else replace(self.before, token=token)


class RowKind(NamedTuple):
    """Drawn when a row is opened."""

    is_short: bool
    """Cut into parts that do not see each other."""
    is_heads: bool
    """Short, and every piece in it begins with a document's first token."""
    has_spans: bool
    """Whole spans are masked or left."""


class PackedRow(NamedTuple):
    """ids int64, doc_ids int32 and span_ids int32, each (T,)."""

    ids: np.ndarray
    doc_ids: np.ndarray
    span_ids: np.ndarray
    kind: RowKind
    part_length: int
    num_heads: int
    """Parts that begin with a document's first token."""


class OpenRow:
    """A row of pieces in the order in which they came."""

    def __init__(self, kind: RowKind, data: DataConfig) -> None:
        self.kind = kind
        self._row_length = data.row_length
        self._part_length = data.short_length if kind.is_short else data.row_length
        self._pieces: list[tuple[TokenDocument, int, int]] = []
        self.num_free = data.row_length

    @property
    def room(self) -> int:
        """Tokens that the next piece may have: a row of heads takes no piece over a part's edge."""
        return (self.num_free - 1) % self._part_length + 1 if self.kind.is_heads else self.num_free

    def append(self, document: TokenDocument, token: int, size: int) -> None:
        """Takes `size` tokens of the document from `token` on."""
        self._pieces.append((document, token, size))
        self.num_free -= size

    def packed(self, pad_id: int) -> PackedRow:
        T, num_tokens = self._row_length, self._row_length - self.num_free
        ids = np.full(T, pad_id, dtype=np.int64)
        doc_ids = np.full(T, -1, dtype=np.int32)
        if self._pieces:
            ids[:num_tokens] = np.concatenate([d.ids[at : at + n] for d, at, n in self._pieces])
        sizes = [size for _, _, size in self._pieces]
        doc_ids[:num_tokens] = np.repeat(np.arange(len(sizes)), sizes)
        spans = self._spans(num_tokens)
        starts = np.cumsum([0, *sizes])[:-1]
        firsts = {int(s) for s, (_, at, _) in zip(starts, self._pieces, strict=True) if at == 0}
        num_heads = sum(edge in firsts for edge in range(0, T, self._part_length))
        if self.kind.is_short:
            doc_ids = cut_segments(doc_ids, self._part_length)
        span_ids = number_spans(spans, doc_ids)
        return PackedRow(ids, doc_ids, span_ids, self.kind, self._part_length, num_heads)

    def _spans(self, num_tokens: int) -> np.ndarray:
        """(T,): each piece's own numbers, made distinct between pieces."""
        spans = np.zeros(self._row_length, dtype=np.int32)
        if self.kind.has_spans and self._pieces:
            found = [d.find_spans()[at : at + n] for d, at, n in self._pieces]
            spans[:num_tokens] = np.concatenate(found)
        return spans


def cut_segments(doc_ids: np.ndarray, part_length: int) -> np.ndarray:
    """`doc_ids` (T,) renumbered so that no document reaches over a multiple of `part_length`."""
    parts = np.arange(len(doc_ids)) // part_length
    return _renumbered(doc_ids >= 0, doc_ids, parts) - 1


def number_spans(spans: np.ndarray, doc_ids: np.ndarray) -> np.ndarray:
    """Span numbers (T,) of single pieces as numbers of the row, from 1; a span that a document's
    or a part's edge cuts becomes two, and 0 stays 0."""
    return _renumbered(spans > 0, spans, doc_ids)


def _renumbered(is_member: np.ndarray, *labels: np.ndarray) -> np.ndarray:
    """int32 (T,): members numbered from 1 by runs of equal labels, 0 elsewhere."""
    changes = np.zeros(len(is_member), dtype=bool)
    for label in labels:
        changes[1:] |= label[1:] != label[:-1]
    is_first = is_member & changes
    is_first[:1] = is_member[:1]
    # A run may also begin after a non-member with the same label.
    is_first[1:] |= is_member[1:] & ~is_member[:-1]
    return np.where(is_member, np.cumsum(is_first), 0).astype(np.int32)
