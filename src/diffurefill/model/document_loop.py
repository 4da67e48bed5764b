"""Attention document by document on CPU: the work falls from T x T per row to the documents' own.

A long document gets a call of its own, short ones of like length share one: a call takes as long as
some fifty positions do. Two operators of ours that torch.compile takes as they are: the documents
come as tensors, so a compiled block is not compiled again for every new arrangement of them.
Through plain slices autograd would also clear and add a whole (B, H, T, K) gradient for each
document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffurefill.model.dense_attention import (
    attend_by_products,
    by_products,
    gradients_by_products,
    heads_beside,
)
from diffurefill.model.document_pieces import Pieces, Reader, Result
from diffurefill.model.segments import FILLED_UP, PAD, Ranges

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend_per_document(q: Tensor, k: Tensor, v: Tensor, ranges: Ranges, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(K)) v inside each of the documents of `ranges`, which cover all rows.

    q, k, v and the result are (B, H, T, K); PAD gets its own value.
    """
    return _per_document(q, k, v, *ranges, causal)[0]


# The schemas are written out: older versions of torch do not read postponed annotations.
@torch.library.custom_op(
    "diffurefill::attend_per_document",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor pieces, Tensor sources, Tensor targets, "
    "bool causal) -> (Tensor, Tensor)",
)
def _per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Tensor,
    sources: Tensor,
    targets: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    plan = Pieces(Ranges(pieces, sources, targets), q)
    read_q, read_k, read_v = (Reader(x, plan) for x in (q, k, v))
    out, lse = Result(plan), _empty_lse(q, sources)
    for piece, lse_d in zip(plan.pieces, plan.parts_of(lse), strict=True):
        value = read_v(piece)
        if piece.kind == PAD:
            out.write(value, piece)
            continue
        mask = None if causal else plan.mask(piece)
        inputs = read_q(piece), read_k(piece), value
        if by_products(value):
            qd, kd, vd = (x.contiguous() for x in inputs)
            out.write(attend_by_products(qd, kd, vd, mask, causal=causal), piece)
            continue
        attended, log_sum = _attend(*inputs, 0.0, causal, attn_mask=mask)
        out.write(attended, piece)
        lse_d.copy_(log_sum)
    return out.tensor, lse


@_per_document.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Tensor,
    sources: Tensor,
    targets: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    return heads_beside(q), _empty_lse(q, sources)


@torch.library.custom_op(
    "diffurefill::attend_per_document_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor pieces, "
    "Tensor sources, Tensor targets, bool causal) -> (Tensor, Tensor, Tensor)",
)
def _per_document_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Tensor,
    sources: Tensor,
    targets: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = Pieces(Ranges(pieces, sources, targets), q)
    read_grad, read_q, read_k, read_v, read_out = (Reader(x, plan) for x in (grad, q, k, v, out))
    dq, dk, dv = Result(plan), Result(plan), Result(plan)
    for piece, lse_d in zip(plan.pieces, plan.parts_of(lse), strict=True):
        grad_d = read_grad(piece)
        if piece.kind == PAD:
            dv.write(grad_d, piece)
            dq.write(grad_d.zero_(), piece)
            dk.write(grad_d, piece)
            continue
        if piece.kind == FILLED_UP:
            # The queries of the filling have looked at real keys, which must not hear of it.
            grad_d.mul_(plan.is_real(piece))
        mask = None if causal else plan.mask(piece)
        inputs = grad_d, read_q(piece), read_k(piece), read_v(piece)
        if by_products(grad_d):
            grad_d, qd, kd, vd = (x.contiguous() for x in inputs)
            parts = gradients_by_products(grad_d, qd, kd, vd, mask, causal=causal)
        else:
            saved = read_out(piece), lse_d
            parts = _attend_backward(*inputs, *saved, 0.0, causal, attn_mask=mask)
        dq.write(parts[0], piece)
        dk.write(parts[1], piece)
        dv.write(parts[2], piece)
    return dq.tensor, dk.tensor, dv.tensor


@_per_document_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Tensor,
    sources: Tensor,
    targets: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return heads_beside(q), heads_beside(q), heads_beside(q)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ranges, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, *ranges)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _per_document_backward(grad, *ctx.saved_tensors, ctx.causal)
    return (*gradients, None, None, None, None)


_per_document.register_autograd(_backward, setup_context=_save)


def _empty_lse(q: Tensor, sources: Tensor) -> Tensor:
    """For the log-sum-exp that the operator's backward pass needs, (slots * H,)."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(sources.shape[0] * q.shape[1], dtype=exact)
