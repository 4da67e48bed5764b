"""The documents of a (B, H, T, K) tensor, a piece of them at a time: read for a call, and written.

A document that is alone is read where it lies. Those that share a call are copied side by side,
filled up to one length. Shape letters as in denoiser.py; n documents of L slots are a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from diffurefill.model.segments import ALONE, FILLED_UP, Ranges

BYTES_AT_ONCE = 1 << 19
"""Of one tensor, copied for a call: what the call reads and makes then stays in a core's cache."""


class Piece(NamedTuple):
    """A row of `Ranges.pieces`, or a part of it that has fewer documents."""

    kind: int
    first: int
    count: int
    length: int
    row: int
    start: int


class Pieces:
    """`Ranges` and what one call of the loop derives from them, for all of its tensors."""

    def __init__(self, ranges: Ranges, like: Tensor) -> None:
        self.shape = like.shape
        self.like = like
        self.sources, self.targets = ranges.sources, ranges.targets
        _, H, _, K = like.shape
        self.pieces = list(_cut(ranges.pieces, BYTES_AT_ONCE // (H * K * like.element_size())))

    @cached_property
    def most_slots(self) -> int:
        """Of a piece whose documents are put side by side."""
        return max(p.count * p.length for p in self.pieces if p.kind != ALONE)

    def parts_of(self, lse: Tensor) -> Iterator[Tensor]:
        """Every piece's part of the log-sum-exp, (n, H, L)."""
        H, ends = self.shape[1], self.pieces[-1]
        sizes = [H * p.count * p.length for p in self.pieces]
        used = lse.narrow(0, 0, H * (ends.first + ends.count * ends.length))
        for piece, part in zip(self.pieces, used.split(sizes), strict=True):
            yield part.view(piece.count, H, piece.length)

    def mask(self, piece: Piece) -> Tensor | None:
        """(n, 1, 1, L), to be added to the scores: the filling is no key."""
        if piece.kind != FILLED_UP:
            return None
        n, L = piece.count, piece.length
        return self._mask.narrow(0, piece.first, n * L).view(n, 1, 1, L)

    @cached_property
    def _is_filling(self) -> Tensor:
        B, _, T, _ = self.shape
        return self.targets == B * T

    @cached_property
    def _mask(self) -> Tensor:
        mask = self.like.new_zeros(len(self.targets))
        return mask.masked_fill_(self._is_filling, -torch.inf)

    @cached_property
    def _is_real(self) -> Tensor:
        return self.like.new_ones(len(self.targets)).masked_fill_(self._is_filling, 0.0)

    def is_real(self, piece: Piece) -> Tensor:
        """(n, 1, L, 1): 0 on the filling, else 1."""
        n, L = piece.count, piece.length
        return self._is_real.narrow(0, piece.first, n * L).view(n, 1, L, 1)

    @cached_property
    def sources_by_head(self) -> Tensor:
        """(slots * H,): rows of K numbers in a contiguous (B, H, T, K)."""
        _, H, T, _ = self.shape
        first_head = self.sources + self.sources.div(T, rounding_mode="floor") * ((H - 1) * T)
        return (first_head[:, None] + torch.arange(0, H * T, T)).flatten()


class Reader:
    """The documents of one tensor (B, H, T, K), piece by piece: (n, H, L, K).

    Those of a piece that is not ALONE are copies, and hold until the next is read.
    """

    def __init__(self, x: Tensor, plan: Pieces) -> None:
        self.x, self.plan = x, plan

    def __call__(self, piece: Piece) -> Tensor:
        if piece.kind == ALONE:
            return _where_it_lies(self.x, piece)
        rows, sources, memory = self._side_by_side
        _, H, _, K = self.x.shape
        n, L = piece.count, piece.length
        per_slot = H * K // rows.shape[1]
        copies = memory.narrow(0, 0, n * L * per_slot)
        where = sources.narrow(0, piece.first * per_slot, n * L * per_slot)
        torch.index_select(rows, 0, where, out=copies)
        return copies.view(n, L, H, K).transpose(1, 2)

    @cached_property
    def _side_by_side(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of memory, which of them are in each slot, and memory for those of a piece."""
        x, plan = self.x, self.plan
        B, H, T, K = x.shape
        if x.stride(3) == 1 and x.stride(1) == K and x.stride(0) == T * x.stride(2):
            rows, sources = x.transpose(1, 2).view(B * T, H * K), plan.sources
        else:
            rows, sources = x.contiguous().view(B * H * T, K), plan.sources_by_head
        per_slot = H * K // rows.shape[1]
        return rows, sources, rows.new_empty(plan.most_slots * per_slot, rows.shape[1])


class Result:
    """A tensor (B, H, T, K) that is written piece by piece."""

    def __init__(self, plan: Pieces) -> None:
        B, H, T, K = plan.shape
        self.targets = plan.targets
        # One row more than there are positions: what it gets is for nobody.
        self.rows = plan.like.new_empty(B * T + 1, H * K)
        # Heads side by side in memory, as the next product wants them.
        self.tensor = self.rows[:-1].view(B, T, H, K).transpose(1, 2)

    def write(self, part: Tensor, piece: Piece) -> None:
        """Put `part` (n, H, L, K) into place."""
        if piece.kind == ALONE:
            _where_it_lies(self.tensor, piece).copy_(part)
            return
        size = piece.count * piece.length
        where = self.targets.narrow(0, piece.first, size)
        self.rows.index_copy_(0, where, part.transpose(1, 2).reshape(size, -1))


def _where_it_lies(x: Tensor, piece: Piece) -> Tensor:
    """(1, H, L, K): the document of a piece that is ALONE, in x (B, H, T, K)."""
    _, H, _, K = x.shape
    strides = x.stride()
    begin = x.storage_offset() + piece.row * strides[0] + piece.start * strides[2]
    return x.as_strided((1, H, piece.length, K), strides, begin)


def _cut(pieces: Tensor, most_slots: int) -> Iterator[Piece]:
    """The pieces, those that take more than so many slots in parts."""
    for kind, first, count, length, row, start in pieces.tolist():
        if count == 0:
            return
        step = max(1, most_slots // length)
        for done in range(0, count, step):
            part = min(step, count - done)
            yield Piece(kind, first + done * length, part, length, row, start)
