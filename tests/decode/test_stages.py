import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import DRAFT, REFILL, Stage
from diffurefill.decode import stages as schedule

LENGTHS = st.integers(1, 300)


def quota(stage: Stage, k: int, n: int, masked: int) -> int:
    """What draft pass k may accept of `masked` positions of n."""
    return max(masked - schedule.kept(stage, k, n), schedule.least_accepted(stage))


def temperatures(stage: Stage, n: int, passes: int) -> list[float]:
    return [schedule.temperature(stage, k, n) for k in range(passes)]


def test_the_draft_cools_linearly_from_first_to_last():
    got = temperatures(DRAFT, 128, 12)
    assert got == pytest.approx([2.2 - 1.3 * k / 11 for k in range(12)])


def test_a_single_pass_has_the_last_temperature():
    assert temperatures(Stage(num_passes=1, temperature=(2.2, 0.9)), 5, 1) == pytest.approx([0.9])


def test_uncounted_passes_cool_over_the_passes_the_row_needs():
    stage = Stage(num_passes=0, tokens_per_pass=2, temperature=(2.0, 1.0))
    assert temperatures(stage, 5, 4) == pytest.approx([2.0, 1.5, 1.0, 1.0])


def test_order_noise_falls_to_zero_in_the_last_pass():
    noise = [schedule.order_noise(DRAFT, k, 128) for k in range(12)]
    assert noise == pytest.approx([2.5 * (1 - (k + 1) / 12) for k in range(12)], abs=1e-6)
    assert noise[-1] == 0.0


@given(LENGTHS, st.integers(1, 20), st.sampled_from(["linear", "cosine"]))
def test_quota_leaves_the_scheduled_number_masked_and_ends_at_none(n, K, name):
    stage = Stage(num_passes=K, quota=name)
    masked = n
    for k in range(K):
        take = quota(stage, k, n, masked)
        done = (k + 1) / K
        gamma = math.cos(math.pi / 2 * done) if name == "cosine" else 1 - done
        if masked:
            assert take >= 1
            assert abs(masked - take - n * gamma) < 1 + 1e-3 or take == 1
        masked = max(0, masked - take)
    assert masked == 0


def test_linear_quota_by_hand():
    stage = Stage(num_passes=4)
    assert [quota(stage, k, 10, m) for k, m in enumerate((10, 7, 5, 2))] == [
        3,
        2,
        3,
        2,
    ]


def test_cosine_quota_by_hand():
    stage = Stage(num_passes=3, quota="cosine")
    # 10 cos(pi/6) = 8.66 and 10 cos(pi/3) = 5 stay masked.
    assert [quota(stage, k, 10, m) for k, m in enumerate((10, 8, 5))] == [
        2,
        3,
        5,
    ]


def test_an_unmet_quota_carries_over():
    stage = Stage(num_passes=4)
    assert quota(stage, 1, 12, 12) == 6


def test_every_pass_accepts_at_least_one():
    assert quota(DRAFT, 0, 3, 3) == 1


def test_tokens_per_pass_is_exact_until_a_counted_last_pass():
    stage = Stage(num_passes=3, tokens_per_pass=2)
    assert [quota(stage, k, 20, 20 - 2 * k) for k in range(3)] == [
        2,
        2,
        16,
    ]


def test_passes_are_counted_or_endless():
    assert list(schedule.pass_indices(REFILL)) == list(range(8))
    endless = schedule.pass_indices(Stage(num_passes=0, tokens_per_pass=1))
    assert list(itertools.islice(endless, 3)) == [0, 1, 2]
    no_refill = Stage(num_passes=0, remask_fraction=0.2)
    assert list(schedule.pass_indices(no_refill)) == []


def test_uncounted_passes_are_never_the_last():
    stage = Stage(num_passes=0, tokens_per_pass=1)
    assert not any(schedule.is_last(stage, k) for k in range(5))


@given(LENGTHS, st.floats(0.001, 1.0))
def test_remask_count_is_the_rounded_share_within_one_and_n(n, fraction):
    count = schedule.remask_count(Stage(remask_fraction=fraction), n)
    assert count == max(1, round(fraction * n))
    assert count <= n


def test_a_row_with_nothing_to_fill_remasks_nothing():
    assert [schedule.remask_count(REFILL, n) for n in (0, 4)] == [0, 1]
