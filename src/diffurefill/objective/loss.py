"""Masked cross entropy. The loss of a step is sum(weights * ce) over all masked positions.

The weights are made once from the rows of the whole step, so that any split into micro-batches
adds up to the same loss and the same gradient (spec algorithms 1.3, 1.5).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Literal["pooled", "row", "elbo"]


def token_weights(
    is_masked: Tensor, parts: Tensor, t: Tensor, num_eligible: Tensor, loss: Loss
) -> Tensor:
    """Weight (B, T) float32 of every position's cross entropy, 0 where nothing is masked.

    is_masked: (B, T) bool, all rows of the step; parts: (B, T) int64, the row, or part of a short
    row, that each position belongs to; t: (P,) mask rates; num_eligible: (P,).

    pooled: the mean over all masked positions. row: the mean over the parts that have a mask, of
    each part's mean, so that a part of a short row counts as much as a whole row. elbo: 1 / t at
    masked positions, over all eligible positions. A step without masks has zero weights, never NaN.
    """
    masked = is_masked.float()
    if loss == "pooled":
        return masked / masked.sum().clamp(min=1)
    if loss == "row":
        per_part = torch.zeros(len(t)).index_add_(0, parts.flatten(), masked.flatten())
        return masked / per_part.clamp(min=1)[parts] / (per_part > 0).sum().clamp(min=1)
    return masked / t[parts] / num_eligible.sum().clamp(min=1)


def masked_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum(weights * ce), a scalar in nats, and the unweighted ce (N,), detached, for the log.

    logits (N, V) at masked positions; targets and weights (N,). N may be 0: the sum is then 0 and
    its gradient zero.
    """
    ce = token_cross_entropy(logits, targets)
    return (weights * ce).sum(), ce.detach()


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy (N,) in nats, fp32 whatever the dtype of logits (N, V): 16-bit log-softmax
    errs by more than late training moves."""
    return F.cross_entropy(logits.float(), targets, reduction="none")
