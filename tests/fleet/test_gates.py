"""Which deltas are refused by what was measured."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.fleet import gates

WARM, FRESH = gates.FRESH_STEPS, gates.FRESH_STEPS - 1


def test_a_norm_is_unusual_only_against_enough_others() -> None:
    assert gates.norm_is_usual(1e9, WARM, [1.0] * 3, 4.0)
    assert gates.norm_is_usual(4.0, WARM, [1.0] * 4, 4.0)
    assert not gates.norm_is_usual(4.1, WARM, [1.0] * 4, 4.0)


def test_fresh_moments_may_make_longer_steps() -> None:
    assert gates.norm_is_usual(20.0, FRESH, [1.0] * 4, 4.0)
    assert not gates.norm_is_usual(20.1, FRESH, [1.0] * 4, 4.0)
    assert gates.norms_stand_out([1.0, 9.0, 1.0], [WARM, FRESH, WARM]) == [False] * 3
    assert gates.norms_stand_out([1.0, 16.0, 1.0], [WARM, FRESH, WARM]) == [False, True, False]


def test_one_long_delta_stands_out_of_three_but_not_of_two() -> None:
    assert gates.norms_stand_out([1.0, 9.0], [WARM] * 2) == [False, False]
    assert gates.norms_stand_out([1.0, 9.0, 1.0], [WARM] * 3) == [False, True, False]


def test_only_the_delta_that_points_most_against_the_others_is_refused() -> None:
    assert gates.cosines_stand_out([0.3, -0.9], -0.2) == [False, False]
    assert gates.cosines_stand_out([-0.3, -0.9, 0.1], -0.2) == [False, True, False]
    assert gates.cosines_stand_out([0.2, 0.3, 0.1], -0.2) == [False] * 3
    assert gates.cosines_stand_out([], -0.2) == []


@pytest.mark.parametrize(
    ("change", "worse"),
    [(0.0, False), (0.04, False), (0.06, True), (-1.0, False), (math.nan, True), (math.inf, True)],
)
def test_a_global_is_worse_by_more_than_the_margin(change: float, worse: bool) -> None:
    before = [3.0, 4.0, 5.0]
    assert gates.is_worse(before, [ce + change for ce in before]) is worse


def test_a_noisy_difference_needs_to_be_larger() -> None:
    before = [3.0] * 4
    after = [3.0, 3.4, 2.9, 3.3]  # worse by 0.15, four standard errors are 0.48
    assert not gates.is_worse(before, after)


@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=20))
def test_a_global_is_never_worse_than_itself(scores: list[float]) -> None:
    assert not gates.is_worse(scores, scores)
