"""How many positions are open: what the host knows without asking the device, and what it tells it.

On a GPU a question about a tensor's content waits until everything asked before is computed. Most
need not be put: how many positions a pass accepts or takes back follows from the schedule, but for
what the commit gap keeps back, and that has bounds. A greedy walk with gap g takes at least
ceil(m / (2g - 1)) of m positions, for each one taken keeps out at most 2 (g - 1) others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.config import Stage
from diffurefill.decode import stages as schedule
from diffurefill.runtime import sent

Numbers = NDArray[np.int64]
"""One number for each row, (B,), on the host."""


@dataclass(frozen=True, eq=False)
class Counts:
    """Bounds on a number of each row."""

    low: Numbers
    high: Numbers

    @classmethod
    def exactly(cls, numbers: Numbers) -> Counts:
        return cls(numbers, numbers)

    @property
    def total(self) -> int:
        """At least the sum over the rows."""
        return int(self.high.sum())

    @property
    def is_exact(self) -> bool:
        return bool((self.low == self.high).all())

    @property
    def says_which_rows(self) -> bool:
        """Whether it is known of every row that it has some, or that it has none."""
        return bool(((self.low > 0) == (self.high > 0)).all())

    def within(self, rows: NDArray[np.bool_]) -> Counts:
        """0 in all but these rows."""
        return Counts(self.low * rows, self.high * rows)


def masked_after(stage: Stage, k: int, num_fillable: Numbers, masked: Counts) -> Counts:
    """What draft pass k leaves masked of `masked`. Both bounds rise with the number before."""
    if schedule.is_last(stage, k):
        return Counts.exactly(np.zeros_like(num_fillable))
    if stage.is_adaptive:
        return Counts(np.zeros_like(num_fillable), np.maximum(masked.high - 1, 0))
    kept = each(num_fillable, partial(schedule.kept, stage, k))
    least = schedule.least_accepted(stage)

    def left(number: Numbers, takeable: Numbers) -> Numbers:
        return number - np.minimum(np.maximum(number - kept, least), takeable)

    return Counts(
        left(masked.low, masked.low),
        left(masked.high, least_taken(masked.high, stage.commit_gap)),
    )


def taken_back(stage: Stage, num_fillable: Numbers) -> Counts:
    """What a refill pass takes back; from 0 on where a row may be done with the stage."""
    count = each(num_fillable, partial(schedule.remask_count, stage))
    if stage.stop_unchanged or stage.sure_above is not None or stage.remask_cap is not None:
        return Counts(np.zeros_like(count), count)
    return Counts(np.minimum(count, least_taken(num_fillable, stage.commit_gap)), count)


def each(num_fillable: Numbers, number: Callable[[int], float]) -> NDArray[Any]:
    """What a schedule says of each row: (B,) int64 or float64."""
    return np.array([number(n) for n in num_fillable.tolist()])


def least_taken(numbers: Numbers, gap: int) -> Numbers:
    """How many of so many positions a greedy walk takes at least."""
    return -(-numbers // (2 * gap - 1))


def tell(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """`values` on `device`, for which it is not waited."""
    return sent(torch.from_numpy(values), device)
