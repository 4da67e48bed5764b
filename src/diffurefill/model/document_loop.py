"""Attention document by document on CPU: the work falls from T x T per row to the documents' own.

Two operators of ours that torch.compile takes as they are: the documents come as a tensor, so a
compiled block is not compiled again for every new arrangement of them. Through plain slices
autograd would also clear and add a whole (B, H, T, K) gradient for each document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffurefill.model.dense_attention import by_products, gradients_by_products

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_per_document(q: Tensor, k: Tensor, v: Tensor, table: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(K)) v inside each range of `table` (N, 4): row, start, stop, is PAD.

    q, k, v and the result are (B, H, T, K); the ranges cover all rows; PAD gets its own value.
    """
    return _per_document(q, k, v, table, causal)[0]


# The schemas are written out: older versions of torch do not read postponed annotations.
@torch.library.custom_op(
    "diffurefill::attend_per_document",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor table, bool causal) -> (Tensor, Tensor)",
)
def _per_document(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse = _empty_outputs(q)
    for is_pad, qd, kd, vd, out_d, lse_d in _pieces(table, q, k, v, out, lse):
        if is_pad:
            out_d.copy_(vd)
        else:
            attended, log_sum = _attend(qd, kd, vd, 0.0, causal)
            out_d.copy_(attended)
            lse_d.copy_(log_sum)
    return out, lse


@_per_document.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


@torch.library.custom_op(
    "diffurefill::attend_per_document_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor table, "
    "bool causal) -> (Tensor, Tensor, Tensor)",
)
def _per_document_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _empty_gradients(q)
    inputs = (grad, q, k, v, out, lse)
    for is_pad, grad_d, *saved, dq_d, dk_d, dv_d in _pieces(table, *inputs, dq, dk, dv):
        if is_pad:
            dq_d.zero_()
            dk_d.zero_()
            dv_d.copy_(grad_d)
        else:
            parts = _gradients(grad_d, *saved, causal=causal)
            for target, part in zip((dq_d, dk_d, dv_d), parts, strict=True):
                target.copy_(part)
    return dq, dk, dv


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if by_products(q):
        return gradients_by_products(grad, q, k, v, None, causal=causal)
    return _attend_backward(grad, q, k, v, out, lse, 0.0, causal)


@_per_document_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(q)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, table, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, table)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _per_document_backward(grad, *ctx.saved_tensors, ctx.causal)
    return (*gradients, None, None)


_per_document.register_autograd(_backward, setup_context=_save)


def _pieces(table: Tensor, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """For every range: whether it is PAD, and that range of each tensor, (1, H, L, ...).

    Split row by row in one call each: for short documents, indexing them would cost more than
    attending.
    """
    ranges = table.tolist()
    for row in range(tensors[0].shape[0]):
        mine = [(stop - start, pad) for r, start, stop, pad in ranges if r == row and start < stop]
        sizes = [size for size, _ in mine]
        pieces = (x[row : row + 1].split(sizes, dim=2) for x in tensors)
        yield from zip((pad for _, pad in mine), *pieces, strict=True)


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Result (B, H, T, K), its heads side by side in memory as the next product wants them, and
    the log-sum-exp (B, H, T) that the backward pass needs."""
    B, H, T, K = q.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(B, T, H, K).transpose(1, 2), q.new_empty(B, H, T, dtype=exact)


def _empty_gradients(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, H, T, K = q.shape
    dq, dk, dv = (q.new_empty(B, T, H, K).transpose(1, 2) for _ in range(3))
    return dq, dk, dv
