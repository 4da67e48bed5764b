"""Attention over whole rows by torch's fused operator, spared its backward pass in bf16 on a CPU.

There the operator's backward pass leaves the matrix units unused: on a CPU with AMX attention took
three times as long with it as with its products written out, for 32 rows of 128 positions
(bench/attention.py). Scores are made again, some heads at a time, so that they stay in a core's
cache and nothing of size T x T is kept. Shape letters as in denoiser.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES_AT_ONCE = 1 << 20
"""Scores made at a time: 2 MB in bf16."""
LONGEST = 512
"""Positions of a row up to which the products pay: beyond, a head's scores outgrow the cache."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v; q, k, v and the result are (B, H, T, K).

    mask: (B, 1, T, T), as in Segments; every query sees a key.
    """
    if by_products(q):
        return _DenseAttention.apply(q, k, v, mask, causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def by_products(q: Tensor) -> bool:
    """Whether the gradients are better made by `gradients_by_products`."""
    slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= LONGEST
    return slow and not torch.compiler.is_compiling()


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal = causal
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, k, v, mask = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            found = gradients_by_products(grad_outputs[0], q, k, v, mask, causal=ctx.causal)
        return (*found, None, None)


def gradients_by_products(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v (B, H, T, K), under `grad` of the result."""
    B, H, T, _ = q.shape
    if causal:
        mask = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    rows, heads = max(1, SCORES_AT_ONCE // (H * T * T)), max(1, SCORES_AT_ONCE // (T * T))
    for r in range(0, B, rows):
        seen = mask if mask is None or len(mask) == 1 else mask[r : r + rows]
        for h in range(0, H, heads):
            part = (slice(r, r + rows), slice(h, h + heads))
            gradients = _of_some_heads(grad[part], q[part], k[part], v[part], seen)
            for whole, x in zip(found, gradients, strict=True):
                whole[part] = x
    return found


def _of_some_heads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Mask and scale are part of the products, which spares passes over what they read and make."""
    shape = r, h, T, K = q.shape
    scale = K**-0.5
    grad, q, k, v = (x.reshape(r * h, T, K) for x in (grad, q, k, v))
    if mask is None:
        scores = q.new_empty(r * h, T, T).baddbmm_(q, k.mT, beta=0, alpha=scale)
    else:
        start = mask.expand(r, h, T, T).clone(memory_format=torch.contiguous_format)
        scores = start.view(r * h, T, T).baddbmm_(q, k.mT, alpha=scale)
    shares = scores.softmax(dim=-1)
    share_grad = grad @ v.mT
    score_grad = torch._softmax_backward_data(share_grad, shares, -1, shares.dtype)
    dq = torch.baddbmm(q, score_grad, k, beta=0, alpha=scale)
    dk = torch.baddbmm(k, score_grad.mT, q, beta=0, alpha=scale)
    return tuple(x.view(shape) for x in (dq, dk, shares.mT @ grad))
