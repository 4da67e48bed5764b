"""Is the difference real: intervals for one model, paired comparisons of two on the same items.

Two models that answered the same items are compared item by item: the items' difficulty, most of
the noise of either mean, cancels. Every bootstrap has its own key, so a figure never changes by
itself. Sources: Efron and Tibshirani 1993 (percentile bootstrap), Wilson 1927, McNemar 1947.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffurefill.config import UserError
from diffurefill.runtime import philox

RESAMPLES = 10_000
_CHUNK = 1 << 22
"""Draws held at a time: 32 MiB of indices."""


@dataclass(frozen=True)
class Interval:
    """A mean over `num_items` items with the interval that holds it with probability `level`."""

    mean: float
    low: float
    high: float
    num_items: int
    level: float = 0.95

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def proportion(num_right: int, num_items: int, *, level: float = 0.95) -> Interval:
    """A share of yes-or-no items by Wilson's score: sound for few items and near 0 and 1."""
    if not 0 <= num_right <= num_items or num_items < 1:
        raise UserError(f"{num_right} of {num_items} is no share: give at least one item")
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, n = num_right / num_items, num_items
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At the ends rounding must not push the bound past the share itself.
    low, high = max(0.0, min(centre - reach, p)), min(1.0, max(centre + reach, p))
    return Interval(p, low, high, n, level)


def bootstrap_mean(
    values: ArrayLike, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of `values` (N,) and its percentile bootstrap interval.

    Items are drawn with replacement; few distinct values (0 and 1, or -1, 0 and 1) are drawn by
    their counts, which has the same distribution and costs nothing. Raises UserError where there is
    no value or one is not finite.
    """
    x = _finite(values)
    means = _resampled_means(x, resamples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(x.mean()), float(low), float(high), len(x), level)


def _resampled_means(x: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    n = len(x)
    rng = philox(seed, "bootstrap", n, resamples)
    distinct, counts = np.unique(x, return_counts=True)
    if len(distinct) <= 16:
        return rng.multinomial(n, counts / n, size=resamples) @ distinct / n
    per_chunk = max(1, _CHUNK // n)
    parts = [min(per_chunk, resamples - at) for at in range(0, resamples, per_chunk)]
    return np.concatenate([x[rng.integers(0, n, (part, n))].mean(axis=1) for part in parts])


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """mean(a - b) over items that both models met, in the same order, with its interval.

    An interval without 0 says that the models differ on items like these. Raises UserError where
    the two do not have the same number of items.
    """
    return bootstrap_mean(np.subtract(*_paired(a, b)), level=level, resamples=resamples, seed=seed)


def pooled_items(sums: ArrayLike, counts: ArrayLike) -> NDArray[np.float64]:
    """One value (N,) per item whose mean is the pooled ratio sum(sums) / sum(counts).

    An item's value is the ratio, moved by what the item pulls it (the delta method): give the
    values to `bootstrap_mean` for the ratio's interval, or those of two models on the same items to
    `paired_difference`. An item with count 0 pulls nothing.
    """
    x, n = _paired(sums, counts)
    if n.min() < 0 or n.sum() == 0:
        raise UserError("nothing to divide by: every item is empty")
    ratio = x.sum() / n.sum()
    return ratio + (x - ratio * n) / n.mean()


@dataclass(frozen=True)
class McNemar:
    """Items that one model alone got right, and how likely so uneven a split is by chance."""

    only_a: int
    only_b: int
    p_value: float
    """Exact and two-sided; 1 where the two never disagree."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def mcnemar(a: ArrayLike, b: ArrayLike) -> McNemar:
    """The exact test on right and wrong answers `a`, `b` (N,), values 0 and 1 or bools."""
    x, y = _paired(a, b)
    if not np.isin(x, (0, 1)).all() or not np.isin(y, (0, 1)).all():
        raise UserError("McNemar's test takes right and wrong answers: give 0 and 1")
    only_a, only_b = int((x > y).sum()), int((y > x).sum())
    return McNemar(only_a, only_b, _two_sided_sign_test(min(only_a, only_b), only_a + only_b))


def _two_sided_sign_test(fewer: int, total: int) -> float:
    """2 P(X <= fewer) for X ~ Binomial(total, 1/2), at most 1; summed exactly, in integers."""
    tail = term = 1
    for k in range(fewer):
        term = term * (total - k) // (k + 1)
        tail += term
    return min(1.0, math.ldexp(*_fraction(tail, total - 1))) if total else 1.0


def _fraction(numerator: int, power: int) -> tuple[float, int]:
    """numerator / 2**power as (mantissa, exponent), for integers too large for a float."""
    shift = max(0, numerator.bit_length() - 64)
    return float(numerator >> shift), shift - power


def _paired(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = _finite(a), _finite(b)
    if len(x) != len(y):
        raise UserError(
            f"{len(x)} and {len(y)} items cannot be paired: score both models on the same ones"
        )
    return x, y


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise UserError("no items to average: give a list with at least one number")
    if not np.isfinite(x).all():
        raise UserError("an item's value is not finite: leave it out for both models")
    return x
