"""Documents -> rows, in intervals of an exact row count.

`best_fit` keeps a few rows open and cuts only documents longer than a row; `chop` fills one row
after the other. Pieces of several documents share a row and are told apart by `doc_ids`. At an
interval's end the open rows are flushed padded and the piece that found no place starts the next
interval, so nothing but a cursor has to be saved (spec data.md 4 and 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from diffurefill.config import DataConfig
from diffurefill.data.cursors import Cursor
from diffurefill.data.open_rows import OpenRow, PackedRow, RowKind, TokenDocument
from diffurefill.runtime import philox

_MAX_WASTE_TOKENS = 16
"""A row closes when fewer tokens than this, or than a 16th of the row, are free."""


@dataclass(frozen=True)
class Position:
    """Where rows continue: `num_rows` rows into the interval that starts at `cursor`.

    `step` is the global step before that interval: it says which mixture is in force in it.
    """

    cursor: Cursor = field(default_factory=Cursor)
    num_rows: int = 0
    step: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"cursor": self.cursor.to_json(), "num_rows": self.num_rows, "step": self.step}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Position:
        cursor = Cursor.from_json(record["cursor"])
        return cls(cursor, int(record["num_rows"]), int(record["step"]))


@dataclass(frozen=True)
class PackingCounts:
    """What an interval's rows hold, from its start up to some row."""

    num_rows: int = 0
    num_tokens: int = 0
    num_padding: int = 0
    num_parts: int = 0
    """Rows, a short row counted as its parts."""
    num_heads: int = 0
    """Parts whose first token is the first of a document."""
    num_short_rows: int = 0
    num_span_rows: int = 0
    num_span_tokens: int = 0
    documents: Mapping[str, int] = field(default_factory=dict)
    """Documents begun, by source."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens by source."""
    num_documents_cut: int = 0
    """Documents that more than one row holds."""

    @property
    def padding_share(self) -> float:
        return self.num_padding / max(self.num_tokens + self.num_padding, 1)


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of rows (B, T). ids int64; doc_ids int32, ascending from 0, -1 on padding; span_ids
    int32, 0 where there is no span.

    `part_lengths` int32 (B,): a row is corrupted part by part: T, or less in a short row.
    `position` continues right after the last row; `counts` are the interval's up to there.
    """

    ids: np.ndarray
    doc_ids: np.ndarray
    span_ids: np.ndarray
    part_lengths: np.ndarray
    position: Position
    counts: PackingCounts


def pack(
    documents: Iterable[TokenDocument],
    start: Position,
    *,
    data: DataConfig,
    seed: int,
    slot: int,
    interval_rows: int,
    interval_steps: int,
    pad_id: int,
) -> Iterator[Rows]:
    """Rows of shape (1, T), interval after interval, each of exactly `interval_rows` rows and
    `interval_steps` steps.

    `start` is an interval's beginning. A finite stream ends with its open rows, padded.
    """
    key = (seed, "rows", slot)
    interval = _Interval(start, data, key, interval_rows, interval_steps, pad_id)
    for document in documents:
        token = document.before.token
        while token < len(document.ids):
            placed = interval.place(document, token)
            if not placed:
                yield from interval.flush()
            token += placed
            yield from interval.close_rows()
            if interval.is_complete:
                interval = interval.next()
    yield from interval.flush()


class _Interval:
    """The rows of one interval: some emitted, some open, some not yet begun."""

    def __init__(
        self,
        start: Position,
        data: DataConfig,
        key: tuple[int | str, ...],
        num_rows: int,
        num_steps: int,
        pad_id: int,
    ) -> None:
        self.start, self.end = start, start.cursor
        self.data, self.key, self.pad_id = data, key, pad_id
        self.num_rows, self.num_steps = num_rows, num_steps
        self.counts = PackingCounts()
        self.open: list[OpenRow] = []
        # What a row is like depends on the interval and the row's number in it: a resumed run
        # draws the same.
        draws = philox(*key, start.cursor.num_drawn, start.cursor.token).random((num_rows, 2))
        self._is_short, self._has_spans = (draws < [data.short_rows, data.span_rows]).T
        # Where all rows are for heads, they must take the rest of the documents too.
        self._takes_tails = data.short_mode == "docstart" and bool(self._is_short.all())

    def next(self) -> _Interval:
        sizes = (self.num_rows, self.num_steps)
        return _Interval(self._end_position(), self.data, self.key, *sizes, self.pad_id)

    def _end_position(self) -> Position:
        return Position(self.end, 0, self.start.step + self.num_steps)

    @property
    def is_complete(self) -> bool:
        return self.counts.num_rows == self.num_rows

    @property
    def num_begun(self) -> int:
        return self.counts.num_rows + len(self.open)

    def place(self, document: TokenDocument, token: int) -> int:
        """Puts the next piece of the document, from `token` on, into a row; how many tokens.

        0, and no change, where no row takes it.
        """
        row, size = self._choose(document, token)
        if row is None:
            return 0
        row.append(document, token, size)
        self._count_piece(document, token, size)
        self.end = document.cursor_at(token + size)
        return size

    def _choose(self, document: TokenDocument, token: int) -> tuple[OpenRow | None, int]:
        left = len(document.ids) - token
        while True:
            # A row of document heads goes first: it has room for nothing else.
            for row in self.open:
                if row.kind.is_heads and (token == 0 or self._takes_tails):
                    return row, min(left, row.room)
            rows = [row for row in self.open if not row.kind.is_heads]
            if self.data.packing == "chop":
                size = min(left, rows[0].room) if rows else 0
            else:
                size = min(left, self.data.row_length)
                rows = [row for row in rows if row.room >= size]
            if rows:
                return min(rows, key=_free), size
            if self.num_begun == self.num_rows:
                return None, 0
            self.open.append(OpenRow(self._kind(self.num_begun), self.data))

    def _kind(self, number: int) -> RowKind:
        is_short = bool(self._is_short[number])
        is_heads = is_short and self.data.short_mode == "docstart"
        return RowKind(is_short, is_heads, bool(self._has_spans[number]))

    def _count_piece(self, document: TokenDocument, token: int, size: int) -> None:
        counts, source = self.counts, document.source
        documents = dict(counts.documents)
        documents[source] = documents.get(source, 0) + (token == 0)
        is_first_cut = token == 0 and size < len(document.ids)
        self.counts = replace(
            counts,
            documents=documents,
            tokens={**counts.tokens, source: counts.tokens.get(source, 0) + size},
            num_documents_cut=counts.num_documents_cut + is_first_cut,
        )

    def close_rows(self) -> Iterator[Rows]:
        """Emits the fullest row while it is as good as full or too many rows are open."""
        T = self.data.row_length
        limit = 1 if self.data.packing == "chop" else max(1, min(_MAX_WASTE_TOKENS, T // 16))
        max_open = 1 if self.data.packing == "chop" else self.data.open_rows
        while self.open:
            fullest = min(self.open, key=_free)
            ordinary = [row for row in self.open if not row.kind.is_heads]
            if _free(fullest) < limit:
                yield self._emit(fullest)
            elif len(ordinary) > max_open:
                yield self._emit(min(ordinary, key=_free))
            else:
                return

    def flush(self) -> Iterator[Rows]:
        while self.open:
            yield self._emit(self.open[0])

    def _emit(self, open_row: OpenRow) -> Rows:
        self.open.remove(open_row)
        row = open_row.packed(self.pad_id)
        self.counts = _with_row(self.counts, row)
        position = replace(self.start, num_rows=self.counts.num_rows)
        if self.is_complete:
            position = self._end_position()
        part_lengths = np.array([row.part_length], dtype=np.int32)
        arrays = (row.ids[None], row.doc_ids[None], row.span_ids[None], part_lengths)
        return Rows(*arrays, position, self.counts)


def _with_row(counts: PackingCounts, row: PackedRow) -> PackingCounts:
    num_tokens, num_parts = int((row.doc_ids >= 0).sum()), len(row.ids) // row.part_length
    return replace(
        counts,
        num_rows=counts.num_rows + 1,
        num_tokens=counts.num_tokens + num_tokens,
        num_padding=counts.num_padding + len(row.ids) - num_tokens,
        num_parts=counts.num_parts + num_parts,
        num_heads=counts.num_heads + row.num_heads,
        num_short_rows=counts.num_short_rows + (num_parts > 1),
        num_span_rows=counts.num_span_rows + row.kind.has_spans,
        num_span_tokens=counts.num_span_tokens + int((row.span_ids > 0).sum()),
    )


def _free(row: OpenRow) -> int:
    return row.num_free
