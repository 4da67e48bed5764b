"""Documents -> rows: online best fit over a few open rows, in intervals of an exact row count.

A document is BOS + tokens + EOS, cut into pieces of at most T tokens. A piece never crosses a row;
several share one and are told apart by `doc_ids`. At an interval's end the open rows are flushed
padded and the piece that found no place starts the next interval, so nothing but a cursor has to
be saved (spec data.md 4 and 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from diffurefill.data.documents import Cursor

_MAX_WASTE_TOKENS = 16
"""A row closes when fewer tokens than this, or than a 16th of the row, are free."""


@dataclass(frozen=True)
class Position:
    """Where rows continue: `num_rows` rows into the interval that starts at `cursor`."""

    cursor: Cursor = field(default_factory=Cursor)
    num_rows: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"cursor": self.cursor.to_json(), "num_rows": self.num_rows}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Position:
        return cls(Cursor.from_json(record["cursor"]), int(record["num_rows"]))


@dataclass(frozen=True)
class PackingCounts:
    """What an interval's rows hold, from its start up to some row."""

    num_rows: int = 0
    num_tokens: int = 0
    num_padding: int = 0
    num_documents_cut: int = 0
    """Documents longer than a row that were begun."""

    @property
    def padding_share(self) -> float:
        total = self.num_tokens + self.num_padding
        return self.num_padding / total if total else 0.0


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of rows. ids int64 (B, T); doc_ids int32 (B, T), ascending from 0, -1 on padding.

    `position` continues right after the last row; `counts` are the interval's up to there.
    """

    ids: np.ndarray
    doc_ids: np.ndarray
    position: Position
    counts: PackingCounts


class Piece(NamedTuple):
    """`ids` int64 (n,), 1 <= n <= T; `after` is the cursor once it is consumed."""

    ids: np.ndarray
    after: Cursor


def cut_documents(
    documents: Iterable[tuple[Sequence[int], Cursor]],
    *,
    row_length: int,
    bos_id: int,
    eos_id: int,
    first_piece: int = 0,
) -> Iterator[Piece]:
    """The pieces of documents given as (tokens, cursor after the document).

    `first_piece` says where in the first document to begin.
    """
    for tokens, after in documents:
        ids = np.array([bos_id, *tokens, eos_id], dtype=np.int64)
        num_pieces = -(-len(ids) // row_length)
        for index in range(first_piece, num_pieces):
            cursor = after
            if index < num_pieces - 1:
                cursor = replace(after, document=after.document - 1, piece=index + 1)
            start = index * row_length
            yield Piece(ids[start : start + row_length], cursor)
        first_piece = 0


def pack(
    pieces: Iterable[Piece],
    start: Cursor,
    *,
    interval_rows: int,
    row_length: int,
    open_rows: int,
    pad_id: int,
) -> Iterator[Rows]:
    """Rows of shape (1, T), interval after interval; each interval has exactly `interval_rows`.

    `start` is the cursor before the first piece. A finite stream ends with its open rows, padded.
    """
    interval = _Interval(start, interval_rows, row_length, open_rows, pad_id)
    for piece in pieces:
        if not interval.place(piece):
            yield from interval.flush()
            interval = interval.next()
            placed = interval.place(piece)
            assert placed, "an empty interval takes any piece"
        yield from interval.close_rows()
        if interval.is_complete:
            interval = interval.next()
    yield from interval.flush()


class _OpenRow:
    def __init__(self, row_length: int) -> None:
        self.pieces: list[np.ndarray] = []
        self.num_free = row_length

    def append(self, ids: np.ndarray) -> None:
        self.pieces.append(ids)
        self.num_free -= len(ids)


class _Interval:
    """The rows of one interval: some emitted, some open, some not yet begun."""

    def __init__(
        self, start: Cursor, num_rows: int, row_length: int, max_open: int, pad_id: int
    ) -> None:
        self.start = self.end = start
        self.num_rows, self.row_length = num_rows, row_length
        self.max_open, self.pad_id = max_open, pad_id
        self.counts = PackingCounts()
        self.open: list[_OpenRow] = []

    def next(self) -> _Interval:
        return _Interval(self.end, self.num_rows, self.row_length, self.max_open, self.pad_id)

    @property
    def is_complete(self) -> bool:
        return self.counts.num_rows == self.num_rows

    def place(self, piece: Piece) -> bool:
        """Puts the piece into the fullest row that takes it; False, and no change, if none does."""
        fitting = [row for row in self.open if row.num_free >= len(piece.ids)]
        if fitting:
            row = min(fitting, key=_free)
        elif self.counts.num_rows + len(self.open) < self.num_rows:
            row = _OpenRow(self.row_length)
            self.open.append(row)
        else:
            return False
        row.append(piece.ids)
        self.end = piece.after
        if piece.after.piece == 1:
            num_cut = self.counts.num_documents_cut + 1
            self.counts = replace(self.counts, num_documents_cut=num_cut)
        return True

    def close_rows(self) -> Iterator[Rows]:
        """Emits the fullest row while it is as good as full or too many rows are open."""
        limit = max(1, min(_MAX_WASTE_TOKENS, self.row_length // 16))
        while self.open:
            fullest = min(self.open, key=_free)
            if fullest.num_free >= limit and len(self.open) <= self.max_open:
                return
            yield self._emit(fullest)

    def flush(self) -> Iterator[Rows]:
        while self.open:
            yield self._emit(self.open[0])

    def _emit(self, row: _OpenRow) -> Rows:
        self.open.remove(row)
        ids = np.full((1, self.row_length), self.pad_id, dtype=np.int64)
        doc_ids = np.full((1, self.row_length), -1, dtype=np.int32)
        num_tokens = self.row_length - row.num_free
        ids[0, :num_tokens] = np.concatenate(row.pieces)
        lengths = [len(piece) for piece in row.pieces]
        doc_ids[0, :num_tokens] = np.repeat(np.arange(len(lengths)), lengths)
        self.counts = replace(
            self.counts,
            num_rows=self.counts.num_rows + 1,
            num_tokens=self.counts.num_tokens + num_tokens,
            num_padding=self.counts.num_padding + row.num_free,
        )
        inside = Position(self.start, self.counts.num_rows)
        return Rows(ids, doc_ids, Position(self.end) if self.is_complete else inside, self.counts)


def _free(row: _OpenRow) -> int:
    return row.num_free
