"""The head and its loss as one: logits of a few positions at a time, and never all of them.

A step's logits are its largest tensor by far: 9,000 masked positions of a 73,760-piece vocabulary
take 2.7 GB in fp32, and autograd would keep them. Here each chunk of positions is turned into its
share of the loss and of both gradients at once, and forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.objective.loss import masked_cross_entropy

CHUNK_BYTES = 2**30
"""Of logits at once, with their copy in the other precision. Fewer bytes cost speed: every chunk
reads and writes the head's whole fp32 gradient once."""
CHUNK_MULTIPLE = 128


def head_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    cast: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """sum(weights * ce) in nats, and the unweighted ce (N,), detached, for the log.

    hidden: (N, D), normed; head: (V, D), the fp32 weights; targets, weights: (N,); N may be 0.
    chunk_bytes: None computes all logits at once, which on a CPU is faster.
    cast: `head` in the dtype of `hidden`, for the chunks; None where it has that dtype. The
    gradient of `head` adds up in fp32 all the same.
    """
    if chunk_bytes is None:
        return masked_cross_entropy(F.linear(hidden, head), targets, weights)
    rows = chunk_rows(len(head), chunk_bytes)
    copy = head.detach() if cast is None else cast
    return _Chunked.apply(hidden, head, copy, targets, weights, rows)


def chunk_rows(vocab_size: int, chunk_bytes: int) -> int:
    """Positions whose logits fit, in fp32 twice; products want a multiple of 128 where it is not
    too small for one."""
    rows = max(1, chunk_bytes // (8 * vocab_size))
    return rows // CHUNK_MULTIPLE * CHUNK_MULTIPLE or rows


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        copy: Tensor,
        targets: Tensor,
        weights: Tensor,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        ce = torch.empty_like(weights)
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            ce[at], grad_hidden[at] = _chunk(hidden[at], copy, targets[at], weights[at], grad_head)
        ctx.gradients = grad_hidden, grad_head
        ctx.mark_non_differentiable(ce)
        return (weights * ce).sum(), ce

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        # Scaled where they lie, so they serve once: a second backward finds nothing.
        grad_hidden, grad_head = ctx.gradients
        del ctx.gradients
        scale = grad_outputs[0]
        return grad_hidden.mul_(scale), grad_head.mul_(scale), None, None, None, None


def _chunk(
    hidden: Tensor, copy: Tensor, targets: Tensor, weights: Tensor, grad_head: Tensor
) -> tuple[Tensor, Tensor]:
    """ce (n,) and the gradient of `hidden` (n, D); adds to `grad_head` (V, D).

    With p = softmax(logits): d(weight * ce) / d logits = weight * (p - onehot(target)).
    """
    log_p = torch.log_softmax(F.linear(hidden, copy), -1, dtype=torch.float32)
    at = targets[:, None]
    ce = -log_p.gather(-1, at).squeeze(-1)
    d_logits = log_p.exp_()
    d_logits.scatter_add_(-1, at, torch.full_like(at, -1.0, dtype=d_logits.dtype))
    d_logits = d_logits.mul_(weights[:, None]).to(hidden.dtype)
    if grad_head.dtype == hidden.dtype:
        grad_head.addmm_(d_logits.T, hidden)
    else:
        grad_head += d_logits.T @ hidden
    return ce, d_logits @ copy
