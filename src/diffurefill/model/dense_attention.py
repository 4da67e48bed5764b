"""Attention over whole rows: torch's fused operator, or its products written out in bf16 on a CPU.

There the fused operator leaves the units for bf16 products half unused: it takes 1.7 to 3 times as
long, forward and backward, on rows of up to 512 (bench/attention.py, `torch`). Scores are made some
heads at a time, so that they stay in a core's cache, and again for the gradients: nothing of size
T x T is kept. They are rounded to bf16, as everything between products is there
(bench/precision.py says what that changes in training). Shape letters as in denoiser.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES_AT_ONCE = 1 << 19
"""Scores made at a time: 1 MB in bf16."""
LONGEST = 768
"""Positions of a row up to which the products pay: beyond, a head's scores outgrow the cache."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v; q, k, v and the result are (B, H, T, K).

    mask: (B, 1, T, T), as in Segments; every query sees a key.
    """
    if by_products(q):
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return _by_products(q, k, v, mask, causal)
        return attend_by_products(q, k, v, mask, causal=causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def by_products(q: Tensor) -> bool:
    """Whether attention is better made by `attend_by_products` and `gradients_by_products`."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= LONGEST


# Operators of ours, so that torch.compile takes them as they are. The schemas are written out:
# older versions of torch do not read postponed annotations.
@torch.library.custom_op(
    "diffurefill::attend_by_products",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal) -> Tensor",
)
def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return attend_by_products(q, k, v, mask, causal=causal)


@_by_products.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return heads_beside(q)


@torch.library.custom_op(
    "diffurefill::attend_by_products_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal)"
    " -> (Tensor, Tensor, Tensor)",
)
def _by_products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_by_products(grad, q, k, v, mask, causal=causal)


@_by_products_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return heads_beside(q), heads_beside(k), heads_beside(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, ctx.causal = inputs
    ctx.save_for_backward(*saved)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_by_products_backward(grad, *ctx.saved_tensors, ctx.causal), None, None)


_by_products.register_autograd(_backward, setup_context=_save)


def heads_beside(q: Tensor) -> Tensor:
    """Room for a (B, H, T, K), heads side by side in memory."""
    B, H, T, K = q.shape
    return q.new_empty(B, T, H, K).transpose(1, 2)


def attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool
) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v, (B, H, T, K)."""
    out = heads_beside(q)
    for part, seen in _parts(q, mask, causal):
        q_, k_, v_ = (_flat(x[part]) for x in (q, k, v))
        out[part] = (_shares(q_, k_, seen) @ v_).view(out[part].shape)
    return out


def gradients_by_products(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v (B, H, T, K), under `grad` of the result."""
    found = heads_beside(q), heads_beside(k), heads_beside(v)
    for part, seen in _parts(q, mask, causal):
        grad_, q_, k_, v_ = (_flat(x[part]) for x in (grad, q, k, v))
        gradients = _gradients_of_some_heads(grad_, q_, k_, v_, seen)
        for whole, x in zip(found, gradients, strict=True):
            whole[part] = x.view(whole[part].shape)
    return found


def _gradients_of_some_heads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5
    shares = _shares(q, k, mask)
    share_grad = grad @ v.mT
    score_grad = torch._softmax_backward_data(share_grad, shares, -1, shares.dtype)
    dq = torch.baddbmm(q, score_grad, k, beta=0, alpha=scale)
    dk = torch.baddbmm(k, score_grad.mT, q, beta=0, alpha=scale)
    return dq, dk, shares.mT @ grad


def _shares(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask), (n, T, T) from (n, T, K): mask and scale are part of the
    product, which spares passes over what it makes."""
    n, T, K = q.shape
    if mask is None:
        scores = q.new_empty(n, T, T).baddbmm_(q, k.mT, beta=0, alpha=K**-0.5)
    else:
        r = len(mask)
        start = mask.expand(r, n // r, T, T).clone(memory_format=torch.contiguous_format)
        scores = start.view(n, T, T).baddbmm_(q, k.mT, alpha=K**-0.5)
    return scores.softmax(dim=-1)


def _parts(
    q: Tensor, mask: Tensor | None, causal: bool
) -> Iterator[tuple[tuple[slice, slice], Tensor | None]]:
    """Some rows and heads at a time, and the mask of these rows as numbers to be added."""
    B, H, T, _ = q.shape
    if causal:
        mask = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    rows, heads = max(1, SCORES_AT_ONCE // (H * T * T)), max(1, SCORES_AT_ONCE // (T * T))
    for r in range(0, B, rows):
        seen = mask if mask is None or len(mask) == 1 else mask[r : r + rows]
        for h in range(0, H, heads):
            yield (slice(r, r + rows), slice(h, h + heads)), seen


def _flat(x: Tensor) -> Tensor:
    """(r * h, T, K) of (r, h, T, K)."""
    return x.reshape(-1, *x.shape[2:])
