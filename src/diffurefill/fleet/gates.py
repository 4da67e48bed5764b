"""Which deltas are sound enough to be merged: pure rules on what was measured.

With two to four workers no robust mean can tell a liar (a median of two is the mean), so faulty
contributions are refused by what they are: too long, against all others, or harmful on held-out
text. Source: spec fleet.md 5.3.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MIN_NORMS = 4
"""Accepted norms below which there is no telling what is usual."""
FRESH_STEPS = 100
FRESH_SLACK = 5.0
"""Moments that have seen few steps make steps several times as long (Adam's first ones have the
length of the learning rate in every element). Without this slack a fleet that starts again after a
total loss is refused for ever by the norms of its own past."""
ROUND_RATIO = 3.0
"""Within a round of three or more, a delta longer than so many times the median is refused."""
GUARD_MARGIN = 0.05
"""Nats per masked token by which a new global may always be worse: noise of a young model."""
GUARD_SIGMAS = 4.0


def slack(moment_steps: int) -> float:
    """How many times longer than usual a delta may be for its moments being fresh."""
    return FRESH_SLACK if moment_steps < FRESH_STEPS else 1.0


def norm_is_usual(
    norm: float, moment_steps: int, accepted: Sequence[float], max_ratio: float
) -> bool:
    """Against the norms accepted before (the last 20)."""
    if len(accepted) < MIN_NORMS:
        return True
    return norm <= max_ratio * slack(moment_steps) * statistics.median(accepted)


def norms_stand_out(norms: Sequence[float], moment_steps: Sequence[int]) -> list[bool]:
    """Within one round; only three or more can tell."""
    if len(norms) < 3:
        return [False] * len(norms)
    usual = ROUND_RATIO * statistics.median(norms)
    return [n > slack(steps) * usual for n, steps in zip(norms, moment_steps, strict=True)]


def cosines_stand_out(cosines: Sequence[float], min_cosine: float) -> list[bool]:
    """Deltas that point against the sum of the others; at most one, the worst, is refused at a
    time, because a single bad one turns the others' cosines too."""
    worst = min(cosines, default=1.0)
    if len(cosines) < 3 or worst >= min_cosine:
        return [False] * len(cosines)
    first = cosines.index(worst)
    return [index == first for index in range(len(cosines))]


def is_worse(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether a global is worse than the one before it, by the CE of the same held-out rows.

    Paired by row, so the rows' own difficulty cancels: worse by more than `GUARD_MARGIN` and by
    more than `GUARD_SIGMAS` standard errors of the mean difference. A CE that is not finite is
    worse than any.
    """
    if not all(math.isfinite(ce) for ce in after):
        return True
    differences = [a - b for a, b in zip(after, before, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(after) > 1 else 0.0
    return statistics.fmean(differences) > max(GUARD_MARGIN, GUARD_SIGMAS * error)
