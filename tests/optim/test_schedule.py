import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import OptimConfig, load_preset
from diffurefill.optim.schedule import learning_rate

REPORT = load_preset("base-1b").optim
HALVED = REPORT.peak_lr[1][0]


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 3e-4 / 500),
        (250, 1.5e-4),
        (500, 3e-4),
        (50_000, 1.305e-4),
        (84_000, 9.96e-5),
        (100_000, 8.28e-5),
        (158_800, 2.87e-5),
        (180_000, 1.832e-5),
        (190_000, 9.16e-6),
        (200_000, 0.0),
        (200_500, 0.0),
    ],
)
def test_the_report_rates(step, rate):
    assert learning_rate(step, REPORT) == pytest.approx(rate, rel=1e-3)


def test_without_a_tail_the_cosine_ends_and_stays_at_the_floor():
    config = OptimConfig(peak_lr=((0, 1.5e-4),))
    assert learning_rate(200_000, config) == pytest.approx(1.5e-5)
    assert learning_rate(250_000, config) == pytest.approx(1.5e-5)


def test_a_new_peak_multiplies_the_rate_at_once():
    constant = OptimConfig(tail_from_step=REPORT.tail_from_step)
    assert learning_rate(HALVED - 1, REPORT) == learning_rate(HALVED - 1, constant)
    for step in (HALVED, HALVED + 1, 150_000, 190_000):
        assert learning_rate(step, REPORT) == pytest.approx(learning_rate(step, constant) / 2)


def test_a_new_peak_inside_the_tail_counts_too():
    config = OptimConfig(peak_lr=((0, 3e-4), (190_000, 1.5e-4)), tail_from_step=180_000)
    constant = OptimConfig(tail_from_step=180_000)
    assert learning_rate(189_999, config) == learning_rate(189_999, constant)
    assert learning_rate(195_000, config) == pytest.approx(learning_rate(195_000, constant) / 2)


@given(step=st.integers(0, 200_000))
def test_the_rate_is_continuous_but_for_the_halving_and_falls_after_warm_up(step):
    now, following = learning_rate(step, REPORT), learning_rate(step + 1, REPORT)
    if step + 1 != HALVED:
        assert abs(following - now) <= 3e-4 / 500 + 1e-12
    if step >= REPORT.warmup_steps:
        assert following <= now


def test_no_warm_up_starts_at_the_peak():
    config = OptimConfig(warmup_steps=0, total_steps=100)
    assert learning_rate(0, config) == 3e-4
    assert learning_rate(50, config) == pytest.approx(
        3e-4 * (0.1 + 0.45 * (1 + math.cos(0.5 * math.pi)))
    )
