"""From a Stage to the numbers of one pass: temperature, order noise, how many to accept or redo.

All are functions of the stage, the pass index k from 0, and the row's own counts, so a row gets the
same numbers alone and in any batch. Source: spec algorithms 5.2-5.4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from diffurefill.config import Stage


def pass_indices(stage: Stage) -> Iterable[int]:
    """k = 0, 1, ...: `num_passes` of them, or without end where a draft takes as many as needed."""
    if stage.num_passes == 0 and not stage.refills:
        return itertools.count()
    return range(stage.num_passes)


def is_last(stage: Stage, k: int) -> bool:
    """Whether pass k must accept everything left; never so where passes are not counted."""
    return k == stage.num_passes - 1


def planned_passes(stage: Stage, num_fillable: int) -> int:
    """K of a row for the schedules: `num_passes`, or n over `tokens_per_pass`; 1 where nobody
    knows, for then nothing falls over the passes."""
    if stage.num_passes > 0 or stage.tokens_per_pass is None:
        return max(1, stage.num_passes)
    return max(1, -(-num_fillable // stage.tokens_per_pass))


def temperature(stage: Stage, k: int, num_fillable: int) -> float:
    """Linear from the first pass to the last. A single pass has the last's value; passes that the
    commit gap adds beyond the plan keep it.
    """
    first, last = stage.temperature
    K = planned_passes(stage, num_fillable)
    return first + (last - first) * (min(1.0, k / (K - 1)) if K > 1 else 1.0)


def order_noise(stage: Stage, k: int, num_fillable: int) -> float:
    """noise * (1 - (k+1)/K), zero in the last pass."""
    return stage.order_noise * max(0.0, 1 - (k + 1) / planned_passes(stage, num_fillable))


def kept(stage: Stage, k: int, num_fillable: int) -> int:
    """How many positions of a row may stay masked after draft pass k; it accepts the others, and
    `least_accepted` in any case.

    By schedule floor(n * gamma((k+1)/K)), so that what the commit gap kept back earlier is caught
    up. None after the last pass, nor by an adaptive quota, which has no number. All where a pass
    accepts `tokens_per_pass`.
    """
    if is_last(stage, k) or stage.is_adaptive:
        return 0
    if stage.tokens_per_pass is not None:
        return num_fillable
    K = stage.num_passes
    if stage.quota == "cosine":
        return math.floor(num_fillable * math.cos(math.pi / 2 * (k + 1) / K))
    return num_fillable * (K - 1 - k) // K


def least_accepted(stage: Stage) -> int:
    """By a draft pass, of a row that has so many masked."""
    return stage.tokens_per_pass or 1


def remask_count(stage: Stage, num_fillable: int) -> int:
    """m of a row: the share of n, rounded, at least 1 and at most n."""
    return min(max(1, round(stage.remask_fraction * num_fillable)), num_fillable)
