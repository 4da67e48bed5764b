"""Attention that keeps packed documents apart: one function, four backends that agree.

`sdpa` takes a dense mask and runs everywhere. `loop` goes document by document on CPU.
`flex` skips whole 128 x 128 blocks and `varlen` sees documents alone, both on CUDA from compute
capability 8.0 on. All derive from `doc_ids`, once per micro-batch (segments.py); backends.py says
which is taken, fastest.py measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diffurefill.model.backends import Shape, check_backend, choose_backend, hardware_of
from diffurefill.model.dense_attention import dense_attention
from diffurefill.model.document_loop import attend_per_document
from diffurefill.model.segments import (
    Backend,
    Packed,
    Ranges,
    Segments,
    documents_of,
    segments_from_doc_ids,
)

__all__ = ["Backend", "Segments", "attention", "plan_segments", "segments_from_doc_ids"]


def plan_segments(
    doc_ids: Tensor | None,
    shape: Shape,
    device: torch.device,
    *,
    causal: bool,
    training: bool,
    backend: Backend | None = None,
) -> Segments:
    """Segments of a micro-batch for the `backend` asked for, or for the one the rules choose.

    doc_ids: (B, T), -1 on PAD, on `device` or on the CPU; None when each row is one document.
    shape: of q, k and v on `device`. training: whether gradients are wanted.
    Raises UserError where the backend cannot run.
    """
    hardware = hardware_of(device)
    on_host = doc_ids is not None and doc_ids.device.type == "cpu"
    documents = documents_of(doc_ids) if doc_ids is not None and on_host else None
    if backend is None:
        # Not on CUDA, where a rare batch of whole rows would compile every block once more.
        if device.type == "cpu" and documents is not None and documents.are_whole_rows:
            return Segments(None, causal)
        backend = choose_backend(hardware, shape, documents, training=training)
    check_backend(backend, hardware, shape, training=training)
    return segments_from_doc_ids(
        doc_ids,
        causal=causal,
        backend=backend,
        device=device,
        dtype=shape.dtype,
        documents=documents,
    )


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """softmax(q k^T / sqrt(K)) v inside each segment; q, k, v and the result are (B, H, T, K).

    A PAD gets its own value. Raises UserError where the backend of `segments` cannot run.
    """
    mask, causal = segments.mask, segments.causal
    if isinstance(mask, Ranges):
        _check("loop", q, k, v)
        return attend_per_document(q, k, v, mask, causal)
    if isinstance(mask, BlockMask):
        _check("flex", q, k, v)
        return _flex(q, k, v, mask)
    if isinstance(mask, Packed):
        _check("varlen", q, k, v)
        return _varlen(q, k, v, mask, causal)
    return dense_attention(q, k, v, mask, causal=causal and mask is None)


def _check(backend: Backend, q: Tensor, k: Tensor, v: Tensor) -> None:
    if torch.compiler.is_compiling():
        return  # `plan_segments` has checked; a refusal inside a graph would not be read
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    B, H, T, K = q.shape
    shape = Shape(B, H, T, K, q.dtype)
    check_backend(backend, hardware_of(q.device), shape, training=training)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
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


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, causal: bool) -> Tensor:
    B, H, T, K = q.shape
    flat = (x.transpose(1, 2).reshape(B * T, H, K) for x in (q, k, v))
    offsets, longest = packed.cu_seqlens, packed.max_length
    window = (-1, 0) if causal else (-1, -1)
    varlen_attn = _varlen_attn()
    out = varlen_attn(*flat, offsets, offsets, longest, longest, window_size=window)
    out = out.view(B, T, H, K).transpose(1, 2)
    if packed.is_pad is None:
        return out
    # PADs of a run have looked at each other: cheaper than a document each. None of it is kept.
    return torch.where(packed.is_pad[:, None, :, None], v, out)


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # torch 2.11; `why_not` looks for it

    return varlen_attn
