"""From a Stage to the numbers of one pass: temperature, order noise, how many to accept or redo.

All are functions of the stage, the pass index k from 0, and each row's own counts, so a row gets
the same numbers alone and in any batch. Source: spec algorithms 5.2-5.4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from diffurefill.config import Stage


def pass_indices(stage: Stage) -> Iterable[int]:
    """k = 0, 1, ...: `num_passes` of them, or without end where a draft takes as many as needed."""
    if stage.num_passes == 0 and not stage.refills:
        return itertools.count()
    return range(stage.num_passes)


def is_last(stage: Stage, k: int) -> bool:
    """Whether pass k must accept everything left; never so where passes are not counted."""
    return k == stage.num_passes - 1


def planned_passes(stage: Stage, num_fillable: Tensor) -> Tensor:
    """K of each row, (B,) int64, for the schedules: `num_passes`, or n over `tokens_per_pass`; 1
    where nobody knows, for then nothing falls over the passes."""
    if stage.num_passes > 0 or stage.tokens_per_pass is None:
        return torch.full_like(num_fillable, max(1, stage.num_passes))
    return (-(-num_fillable // stage.tokens_per_pass)).clamp(min=1)


def temperature(stage: Stage, k: int, planned: Tensor) -> Tensor:
    """(B,) float32, linear from the first pass to the last. A single pass has the last's value;
    passes that the commit gap adds beyond the plan keep it.
    """
    first, last = stage.temperature
    progress = (k / (planned - 1).double()).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
    return (first + (last - first) * progress).float()


def order_noise(stage: Stage, k: int, planned: Tensor) -> Tensor:
    """(B,) float32: noise * (1 - (k+1)/K), zero in the last pass."""
    return (stage.order_noise * (1 - (k + 1) / planned.double()).clamp(min=0.0)).float()


def quota(stage: Stage, k: int, num_fillable: Tensor, num_masked: Tensor) -> Tensor:
    """How many positions each row accepts in draft pass k, (B,) int64.

    By schedule floor(n * gamma((k+1)/K)) stay masked after the pass, so what the commit gap kept
    back earlier is caught up here; at least one is accepted, and all in the last pass. An adaptive
    quota has no number: all may be accepted.
    """
    if is_last(stage, k) or stage.is_adaptive:
        return num_masked
    if stage.tokens_per_pass is not None:
        return torch.full_like(num_masked, stage.tokens_per_pass)
    K = stage.num_passes
    if stage.quota == "cosine":
        keep = (num_fillable.double() * math.cos(math.pi / 2 * (k + 1) / K)).floor().long()
    else:
        keep = num_fillable * (K - 1 - k) // K
    return (num_masked - keep).clamp(min=1)


def remask_count(stage: Stage, num_fillable: Tensor) -> Tensor:
    """m of each row, (B,) int64: the share of n, rounded, at least 1 and at most n."""
    share = (stage.remask_fraction * num_fillable.double()).round().long()
    return torch.minimum(share.clamp(min=1), num_fillable)
