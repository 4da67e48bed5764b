"""Attention that keeps packed documents apart: one function, two backends that agree.

`sdpa` takes a dense boolean mask and runs everywhere. `flex` skips whole 128 x 128 blocks; it pays
on CUDA from compute capability 8.0 on, and cannot train on CPU. Both derive from `doc_ids`, once
per micro-batch, and every layer shares the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diffurefill.config import UserError

Backend = Literal["sdpa", "flex"]
BLOCK = 128
_FIRST_PAD_SEGMENT = 2**30


@dataclass(frozen=True)
class Segments:
    """Who may attend to whom. A dense mask goes to SDPA, a BlockMask to FlexAttention."""

    mask: Tensor | BlockMask | None
    """(B, 1, T, T) bool, True where query i may see key j; None: every position sees the row."""
    causal: bool
    """No position sees a later one. Already part of `mask` where there is one."""


def choose_backend(device: torch.device) -> Backend:
    """`flex` where its Triton kernels run well (CUDA, sm_80 and newer), else `sdpa`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return "flex"
    return "sdpa"


def segments_from_doc_ids(doc_ids: Tensor | None, *, causal: bool, backend: Backend) -> Segments:
    """Segments of a micro-batch from `doc_ids` (B, T), -1 on PAD; None when a row is one document.

    Flex skips most where ids never decrease along a row, as packing writes them; any other order
    gives the same attention with fewer blocks skipped.
    """
    if doc_ids is None:
        return Segments(None, causal)
    segment_ids = _segment_ids(doc_ids)
    if backend == "flex":
        return Segments(_block_mask(segment_ids, causal), causal)
    mask = segment_ids[:, :, None] == segment_ids[:, None, :]
    return Segments((mask.tril() if causal else mask).unsqueeze(1), causal)


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """softmax(q k^T / sqrt(K)) v inside each segment; q, k, v and the result are (B, H, T, K)."""
    if isinstance(segments.mask, BlockMask):
        return _flex(q, k, v, segments.mask)
    if segments.mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=segments.causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=segments.mask)


def _segment_ids(doc_ids: Tensor) -> Tensor:
    """`doc_ids` with every PAD a segment of its own: equality alone then says who sees whom, and
    no query is left without a key (a softmax over nothing is NaN on some backends)."""
    positions = torch.arange(doc_ids.shape[1], device=doc_ids.device, dtype=doc_ids.dtype)
    return torch.where(doc_ids >= 0, doc_ids, _FIRST_PAD_SEGMENT + positions)


def _block_mask(segment_ids: Tensor, causal: bool) -> BlockMask:
    """The blocks `create_block_mask` would find, from each block's lowest and highest segment.

    `create_block_mask` evaluates T x T entries per row; the ranges cost T, and give the same
    blocks (spec performance, D4) when segment ids do not decrease along a row.
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
    padded = F.pad(segment_ids, (0, missing), value=2 * _FIRST_PAD_SEGMENT - 1)
    blocks = padded.view(-1, num_blocks, BLOCK)
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


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    if q.device.type == "cpu" and any(x.requires_grad for x in (q, k, v)):
        raise UserError("FlexAttention cannot train on CPU: ask for the sdpa backend there")
    # Inside a compiled block it is already part of the graph; alone it must be compiled, or it
    # would materialise all T x T scores. On CPU it serves only as a check of the block masks.
    if q.is_cuda and not torch.compiler.is_compiling():
        return _compiled_flex_attention()(q, k, v, block_mask=block_mask)
    out = flex_attention(q, k, v, block_mask=block_mask)
    assert isinstance(out, Tensor)  # a tuple only when the log-sum-exp is asked for
    return out


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # dynamic=False: one graph per shape. Row lengths are few, and dynamic shapes cost speed.
    return torch.compile(flex_attention, dynamic=False)
