"""Intervals and paired tests, beside what can be counted by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.evaluate.statistics import (
    bootstrap_mean,
    mcnemar,
    paired_difference,
    pooled_items,
    proportion,
)


def test_a_share_has_wilson_s_interval() -> None:
    """8 of 10 at 95%: the bounds of the published formula."""
    found = proportion(8, 10)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert 0.25 in proportion(5, 20)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_lies_in_its_interval(counts: tuple[int, int]) -> None:
    found = proportion(*counts)
    assert 0.0 <= found.low <= found.mean <= found.high <= 1.0
    assert found.low < found.high


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_items() -> None:
    x = np.random.default_rng(0).normal(3.0, 2.0, 2000)
    found = bootstrap_mean(x)
    reach = 1.96 * x.std() / math.sqrt(len(x))
    assert (found.low, found.high) == pytest.approx((x.mean() - reach, x.mean() + reach), abs=0.01)


def test_the_bootstrap_holds_the_truth_as_often_as_it_says() -> None:
    """Of 300 sets of normal items 95% have it in their interval; four standard deviations."""
    sets = np.random.default_rng(2).normal(1.0, 2.0, (300, 80))
    held = sum(1.0 in bootstrap_mean(x, resamples=500) for x in sets)
    assert abs(held / 300 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 300)


def test_counts_and_indices_draw_from_the_same_distribution() -> None:
    """0 and 1 are drawn by their counts; the same values a hair apart are drawn one by one."""
    bits = np.arange(200) % 4 == 0
    apart = bits + 1e-9 * np.arange(200)
    a, b = bootstrap_mean(bits), bootstrap_mean(apart)
    assert (a.low, a.high) == pytest.approx((b.low, b.high), abs=0.006)


def test_a_figure_never_changes_by_itself() -> None:
    x = np.random.default_rng(1).random(50)
    assert bootstrap_mean(x) == bootstrap_mean(list(x))


def test_pairing_takes_the_items_difficulty_out() -> None:
    difficulty = np.random.default_rng(0).normal(0.0, 10.0, 300)
    a, b = difficulty + 0.1, difficulty + 0.01 * np.sin(np.arange(300))
    found = paired_difference(a, b)
    assert found.low > 0.09
    assert 0.0 in paired_difference(a, a)
    alone = bootstrap_mean(a)
    assert alone.high - alone.low > 100 * (found.high - found.low)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (6, 2, 2 * 37 / 256), (3, 3, 1.0)],
)
def test_mcnemar_counts_who_was_right_alone(only_a: int, only_b: int, p: float) -> None:
    a = [1] * only_a + [0] * only_b + [1, 0]
    b = [0] * only_a + [1] * only_b + [1, 0]
    found = mcnemar(a, b)
    assert (found.only_a, found.only_b) == (only_a, only_b)
    assert found.p_value == pytest.approx(p)


def test_mcnemar_of_many_items_stays_in_range() -> None:
    a, b = [1] * 6000 + [0] * 4000, [0] * 6000 + [1] * 4000
    assert 0.0 < mcnemar(a, b).p_value < 1e-80
    assert mcnemar(a[1000:9000], b[1000:9000]).p_value < 1e-20
    even = mcnemar([1] * 3000 + [0] * 2990, [0] * 3000 + [1] * 2990)
    assert 0.8 < even.p_value <= 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: bootstrap_mean([]),
        lambda: bootstrap_mean([1.0, float("nan")]),
        lambda: paired_difference([1.0], [1.0, 2.0]),
        lambda: mcnemar([0.5], [1.0]),
        lambda: proportion(3, 2),
    ],
)
def test_what_cannot_be_compared_is_refused(call) -> None:
    with pytest.raises(UserError):
        call()


def test_the_items_of_a_pooled_ratio_have_it_as_their_mean_and_its_interval() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 40, 400).astype(float)
    sums = 3.0 * counts + rng.normal(size=400) * np.sqrt(counts)
    items = pooled_items(sums, counts)
    assert items.mean() == pytest.approx(sums.sum() / counts.sum())
    found = bootstrap_mean(items)
    index = rng.integers(0, 400, (4000, 400))
    low, high = np.quantile(sums[index].sum(1) / counts[index].sum(1), [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * (high - low))
    same = paired_difference(items, pooled_items(sums, counts))
    assert (same.low, same.mean, same.high) == (0, 0, 0)


def test_a_ratio_of_empty_items_is_refused() -> None:
    with pytest.raises(UserError, match="every item is empty"):
        pooled_items([0.0, 0.0], [0.0, 0.0])
