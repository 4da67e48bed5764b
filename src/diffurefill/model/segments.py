"""Who may attend to whom, from `doc_ids`: once per micro-batch, in the form each backend wants.

A position sees the positions of its row with the same id; a PAD (-1) sees itself alone, so that no
softmax runs over nothing. `sdpa` gets a dense mask, `flex` a BlockMask; `loop` and `varlen` get
ranges, for which every document must lie in one piece, as packing writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from diffurefill.config import UserError
from diffurefill.runtime import sent

Backend = Literal["sdpa", "loop", "flex", "varlen"]
BLOCK = 128
_BEYOND = 2**62
"""Above every segment; a power of two, because `F.pad` takes its value through a float."""
_TABLE_STEP, _SLOT_STEP = 64, 1024
"""Tables of ranges grow in steps: a compiled block sees few shapes."""
TOGETHER_BELOW, TOGETHER_FROM = 96, 3
"""Documents of fewer positions share a call of the loop if so many are alike: copying others takes
longer than calls of their own."""
PAD, ALONE, TOGETHER, FILLED_UP = range(4)
"""Kinds of `Ranges.pieces`."""


class Documents(NamedTuple):
    """Runs of equal ids in B rows of T positions, in reading order; on the host."""

    table: NDArray[np.int64]
    """(N, 4): row, start, stop, and 1 for a run of PAD."""
    num_rows: int
    num_positions: int
    in_one_piece: bool
    """False where an id returns in its row after another one."""

    @property
    def are_whole_rows(self) -> bool:
        return len(self.table) == self.num_rows and not self.table[:, 3].any()


class Ranges(NamedTuple):
    """What `loop` walks along, int64 on the CPU. Every position of the rows has a slot; documents
    of like length lie side by side there, filled up to one length: they are one piece.
    """

    pieces: Tensor
    """(M, 6): kind, first slot, number of documents, their length, and for one that is ALONE its
    row and start. All PADs are one piece of length 1. Pieces without documents at the end.
    """
    sources: Tensor
    """(S,): of B * T positions, the one in this slot; on the filling some real one."""
    targets: Tensor
    """(S,): the same, but B * T on the filling."""


class Packed(NamedTuple):
    """What `varlen` wants: all rows laid end to end, a run of PAD counted as a document."""

    cu_seqlens: Tensor
    """(N + 1,) int32 on the device: where each document starts; the total, repeated, at the end."""
    max_length: int
    """At least the longest document; T, half of it or a quarter: compiled graphs are few."""
    is_pad: Tensor | None
    """(B, T) bool; None where there is no PAD."""


@dataclass(frozen=True)
class Segments:
    """One micro-batch's isolation of documents; every layer shares it."""

    mask: Tensor | BlockMask | Ranges | Packed | None
    """A tensor is (B, 1, T, T): bool, True where query i may see key j, or that as 0 and -inf to be
    added to the scores. None: each row is whole."""
    causal: bool
    """No position sees a later one. Already part of a dense mask and of a BlockMask."""


def documents_of(doc_ids: Tensor) -> Documents:
    """The runs of `doc_ids` (B, T). Waits for the device where the ids lie on one."""
    ids = doc_ids.cpu().numpy()
    num_rows, num_positions = ids.shape
    is_start = np.ones(ids.shape, dtype=bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=is_start[:, 1:])
    rows, starts = np.nonzero(is_start)
    stops = np.full(len(starts), num_positions)
    in_row = rows[1:] == rows[:-1]
    stops[:-1][in_row] = starts[1:][in_row]
    values = ids[rows, starts].astype(np.int64)
    is_pad = values < 0
    table = np.stack((rows, starts, stops, is_pad), axis=1).astype(np.int64)
    named = np.stack((rows, values), axis=1)[~is_pad]
    in_one_piece = len(np.unique(named, axis=0)) == len(named)
    return Documents(table, num_rows, num_positions, in_one_piece)


def segments_from_doc_ids(
    doc_ids: Tensor | None,
    *,
    causal: bool,
    backend: Backend,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    documents: Documents | None = None,
) -> Segments:
    """Segments of a micro-batch from `doc_ids` (B, T), -1 on PAD; None when a row is one document.

    device: where attention will run, the ids' own when None. Ids on the CPU spare `varlen` a wait
    for the device. dtype: of q, k and v; given, `sdpa` on CPU gets its mask as numbers, which it
    would else make of the bools in every layer. documents: `documents_of(doc_ids)` if at hand.
    Raises UserError when `loop` or `varlen` meets a document in several pieces.
    """
    if doc_ids is None:
        return Segments(None, causal)
    device = doc_ids.device if device is None else device
    if backend in ("loop", "varlen"):
        documents = documents_of(doc_ids) if documents is None else documents
        if not documents.in_one_piece:
            raise UserError(
                f"a document lies in several pieces of its row, which the {backend} backend cannot "
                "take: use sdpa or flex"
            )
        mask = _ranges(documents, dtype) if backend == "loop" else _packed(documents, device)
        return Segments(mask, causal)
    segment_ids = _segment_ids(sent(doc_ids, device))
    if backend == "flex":
        return Segments(_block_mask(segment_ids, causal), causal)
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    mask = mask.tril() if causal else mask
    if dtype is not None and device.type == "cpu":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return Segments(mask, causal)


# --- ranges ---------------------------------------------------------------------------------------


def slots_of(
    documents: Documents, dtype: torch.dtype | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """What `loop` does with each run of `documents.table`: how many slots it takes, and whether it
    is alone. Others are filled up to a multiple of 8, in bf16 of 16: products are fast there, and
    more documents are alike."""
    starts, stops, is_pad = documents.table.T[1:]
    lengths, step = stops - starts, 16 if dtype == torch.bfloat16 else 8
    filled = -(-lengths // step) * step
    may_share = (lengths < TOGETHER_BELOW) & (is_pad == 0)
    alike = np.bincount(filled[may_share], minlength=documents.num_positions + step)[filled]
    shares = may_share & (alike >= TOGETHER_FROM)
    return np.where(shares, filled, lengths), ~shares & (is_pad == 0)


def _ranges(documents: Documents, dtype: torch.dtype | None) -> Ranges:
    T = documents.num_positions
    rows, starts, stops, is_pad = documents.table.T
    lengths, positions = stops - starts, rows * T + starts
    slots, is_alone = slots_of(documents, dtype)
    # What is one piece: PADs, documents of as many slots, and each that is alone.
    piece = np.where(is_pad, 0, np.where(is_alone, TOGETHER_BELOW + 1 + positions, slots))
    order = np.argsort(piece, kind="stable")
    piece, slots, lengths, positions = (x[order] for x in (piece, slots, lengths, positions))
    first = np.cumsum(slots) - slots
    offsets = np.arange(slots.sum()) - np.repeat(first, slots)
    is_filling = offsets >= np.repeat(lengths, slots)
    sources = np.repeat(positions, slots) + np.where(is_filling, 0, offsets)
    targets = np.where(is_filling, documents.num_rows * T, sources)
    begin = np.flatnonzero(np.diff(piece, prepend=-1))
    is_pad, is_alone = piece[begin] == 0, piece[begin] > TOGETHER_BELOW
    is_filled = np.logical_or.reduceat(lengths < slots, begin)
    kinds = np.select([is_pad, is_alone, is_filled], [PAD, ALONE, FILLED_UP], TOGETHER)
    size = np.where(is_pad, 1, slots[begin])
    count = np.add.reduceat(slots, begin) // size
    table = np.stack((kinds, first[begin], count, size, *np.divmod(positions[begin], T)), axis=1)
    return Ranges(*map(_stepped, (table, sources, targets), (_TABLE_STEP, _SLOT_STEP, _SLOT_STEP)))


def _stepped(values: NDArray[np.int64], step: int) -> Tensor:
    """`values` with zeros behind, up to a multiple of `step`."""
    ends = [(0, -len(values) % step)] + [(0, 0)] * (values.ndim - 1)
    return torch.from_numpy(np.pad(values, ends))


def _packed(documents: Documents, device: torch.device) -> Packed:
    rows, starts, stops, is_pad = documents.table.T
    B, T = documents.num_rows, documents.num_positions
    missing = 1 + -(len(rows) + 1) % _TABLE_STEP
    offsets = np.pad(rows * T + starts, (0, missing), constant_values=B * T)
    longest = int((stops - starts).max())
    pads = None
    if is_pad.any():
        flat = np.repeat(is_pad.astype(bool), stops - starts)
        pads = sent(torch.from_numpy(flat.reshape(B, T)), device)
    return Packed(
        sent(torch.from_numpy(offsets.astype(np.int32)), device),
        next(bound for bound in (-(-T // 4), -(-T // 2), T) if bound >= longest),
        pads,
    )


# --- block masks ----------------------------------------------------------------------------------


def _segment_ids(doc_ids: Tensor) -> Tensor:
    """(B, T) int64: equal exactly where two positions may see each other.

    Every PAD becomes a segment of its own, numbered between the document before it and the next:
    where the documents' ids do not decrease along a row, the segments' do not either.
    """
    T = doc_ids.shape[1]
    ids = doc_ids.long()
    pads = ids.cummax(1).values * (T + 1) + torch.arange(1, T + 1, device=ids.device)
    return torch.where(ids >= 0, ids * (T + 1), pads)


def _block_mask(segment_ids: Tensor, causal: bool) -> BlockMask:
    """The blocks `create_block_mask` would find, from each block's lowest and highest segment.

    `create_block_mask` evaluates T x T entries per row; the ranges cost T, and give the same
    blocks (spec performance, D4) when segment ids do not decrease along a row. In any other order
    attention is the same with fewer blocks skipped.
    """
    num_positions = segment_ids.shape[1]
    num_blocks = -(-num_positions // BLOCK)
    low, high = _block_ranges(segment_ids, num_blocks)
    present = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    constant = low == high
    full = present & constant[:, :, None] & constant[:, None, :]
    if causal:
        present, full = present.tril(), full.tril(-1)
    return BlockMask.from_kv_blocks(
        *_ordered(present & ~full),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(segment_ids, causal),
        seq_lengths=(num_positions, num_positions),
    )


def _block_ranges(segment_ids: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest segment of each block, both (B, num_blocks)."""
    missing = num_blocks * BLOCK - segment_ids.shape[1]
    # Positions past the end count as PAD: a block that is not filled is never a full one.
    blocks = F.pad(segment_ids, (0, missing), value=_BEYOND).view(-1, num_blocks, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Q, K) bool as FlexAttention wants it: counts (B, 1, Q) and indices (B, 1, Q, K), the
    chosen blocks first and in order."""
    blocks = blocks.unsqueeze(1).int()
    indices = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.int()


def _mask_mod(segment_ids: Tensor, causal: bool) -> Callable[..., Tensor]:
    def same_segment(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return segment_ids[b, q] == segment_ids[b, k]

    def same_segment_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (segment_ids[b, q] == segment_ids[b, k]) & (q >= k)

    return same_segment_causal if causal else same_segment
