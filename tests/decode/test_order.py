from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import Stage
from diffurefill.decode.order import Sureness, accept, choose, order_score
from tests.decode.plain import greedy_gap, plain_accept

ROWS = st.integers(1, 40).flatmap(
    lambda T: st.lists(
        st.tuples(
            st.lists(st.integers(-4, 4), min_size=T, max_size=T),  # few values: many ties
            st.lists(st.booleans(), min_size=T, max_size=T),
            st.integers(0, T),
        ),
        min_size=1,
        max_size=3,
    )
)


@settings(max_examples=300)
@given(ROWS, st.integers(1, 30))
def test_choice_equals_the_plain_greedy_walk(rows, gap):
    scores, candidates, quotas = zip(*rows, strict=True)
    chosen = choose(
        torch.tensor(scores).float(), torch.tensor(candidates), torch.tensor(quotas), gap
    )
    for b, (score, candidate, quota) in enumerate(rows):
        wanted = greedy_gap({i: score[i] for i, c in enumerate(candidate) if c}, quota, gap)
        assert chosen[b].nonzero().flatten().tolist() == sorted(wanted)


@pytest.mark.parametrize("gap", [2, 3, 5])
@pytest.mark.parametrize("trend", [-1, 0, 1])
def test_a_long_row_with_or_without_a_trend_is_walked_the_same(gap, trend):
    noise = torch.rand(4, 256, generator=torch.Generator().manual_seed(gap)) * (1 if trend else 99)
    score = trend * torch.arange(256) + 3 * noise
    chosen = choose(score, torch.ones_like(score).bool(), torch.full((4,), 256), gap)
    for b in range(4):
        wanted = greedy_gap(dict(enumerate(score[b].tolist())), 256, gap)
        assert chosen[b].nonzero().flatten().tolist() == sorted(wanted)


def test_gap_one_puts_no_constraint():
    everything = torch.ones(1, 9, dtype=torch.bool)
    assert choose(torch.zeros(1, 9), everything, torch.tensor([9]), 1).all()


def test_equal_scores_go_by_position():
    everything = torch.ones(1, 6, dtype=torch.bool)
    chosen = choose(torch.zeros(1, 6), everything, torch.tensor([2]), 2)
    assert chosen[0].nonzero().flatten().tolist() == [0, 2]


def scores_of(order: str, open_: list[int], **known: list[float]) -> list[float]:
    T = len(open_)
    sure = Sureness(**{name: torch.tensor([values]) for name, values in known.items()})
    at = torch.tensor([open_]).bool()
    score = order_score(Stage(order=order), sure, at, torch.zeros(1), torch.arange(T)[None].float())
    return score[0].tolist()


@pytest.mark.parametrize(
    ("order", "best"),
    [("confidence", 1), ("margin", 2), ("entropy", 3), ("left_to_right", 0), ("random", 4)],
)
def test_each_order_asks_its_own_measure(order, best):
    score = scores_of(
        order,
        [1] * 5,
        confidence=[-3.0, -0.1, -2.0, -1.0, -5.0],
        margin=[-3.0, -2.0, -0.1, -1.0, -5.0],
        entropy=[3.0, 2.0, 1.5, 0.1, 5.0],
    )
    assert score.index(max(score)) == best


def test_middle_is_nearest_to_the_middle_of_its_run():
    score = scores_of("middle", [1, 1, 1, 0, 1, 1, 1, 1], confidence=[0.0] * 8)
    assert [score[i] for i in (0, 1, 2)] == [-2, 0, -2]
    assert score[4:] == [-3, -1, -1, -3]


def test_order_noise_is_scaled_per_row():
    stage, gumbel = Stage(order_noise=2.5), torch.ones(2, 3)
    sure, open_ = Sureness(torch.zeros(2, 3)), torch.ones(2, 3, dtype=torch.bool)
    score = order_score(stage, sure, open_, torch.tensor([0.0, 2.5]), gumbel)
    assert score.tolist() == [[0.0] * 3, [2.5] * 3]


@pytest.mark.parametrize("share", [1.0, 2.0])
def test_gumbel_order_draws_the_first_in_proportion_to_confidence(share):
    """With noise 1 the first accepted position is a draw from softmax(confidence)."""
    N = 20_000
    sure = Sureness(torch.tensor([[0.0, share]]).expand(N, 2))
    everything = torch.ones(N, 2, dtype=torch.bool)
    uniform = torch.rand(N, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gumbel = -(-uniform.log()).log()
    score = order_score(Stage(order_noise=1.0), sure, everything, torch.ones(N), gumbel.float())
    first = choose(score, everything, torch.ones(N).long(), 1)
    expected = torch.sigmoid(torch.tensor(share)).item()
    assert abs(first[:, 1].float().mean().item() - expected) < 4 * (0.25 / N) ** 0.5


# --- counts --------------------------------------------------------------------------------------


PERCENT = st.integers(1, 100).map(lambda n: n / 100)
"""Probabilities that float32 tells apart, also in sums: the plain walk counts in float64."""


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans(), PERCENT), max_size=20),
    st.sampled_from(
        [
            *(Stage(quota="threshold", bound=bound) for bound in (0.0, 0.5013, 0.99)),
            *(Stage(quota="factor", bound=bound) for bound in (0.0, 0.7013, 2.0171)),
            *(Stage(quota="entropy_bound", bound=bound) for bound in (0.0, 0.5013, 2.0171)),
            Stage(quota="one_per_run"),
            Stage(),
        ]
    ),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_each_count_equals_the_plain_walk(row, stage, gap, quota):
    row = [*row, (0, True, 0.5)]
    stage = replace(stage, commit_gap=gap)
    score, open_, p = zip(*row, strict=True)
    entropy = [1.5 * (1 - x) for x in p]
    sure = Sureness(torch.tensor([p]).double().log().float(), None, torch.tensor([entropy]).float())
    got = accept(
        stage, torch.tensor([score]).float(), torch.tensor([open_]), torch.tensor([quota]), sure
    )
    at = [i for i, is_open in enumerate(open_) if is_open]
    known = {i: sure.confidence[0, i].exp().item() for i in at}
    wanted = plain_accept(
        stage, {i: score[i] for i in at}, quota, known, {i: entropy[i] for i in at}
    )
    assert got[0].nonzero().flatten().tolist() == sorted(wanted)
    assert got.any()


def test_the_factor_rule_by_hand():
    """(i + 1) (1 - p): 2 x 0.1 and 3 x 0.2 stay within 0.6, 4 x 0.2 does not."""
    sure = Sureness(torch.tensor([[0.9, 0.8001, 0.8, 0.5]]).log())
    stage = Stage(quota="factor", bound=0.6)
    open_ = torch.ones(1, 4, dtype=torch.bool)
    taken = accept(stage, sure.confidence, open_, torch.tensor([4]), sure)
    assert taken.tolist() == [[True, True, False, False]]


def test_the_entropy_bound_spares_the_largest():
    """Sums less the largest along the walk: 0, 1/8, 3/8, 3/4; the bound itself is within it."""
    entropy = torch.tensor([[0.125, 0.25, 0.375, 0.5]])
    stage = Stage(quota="entropy_bound", order="entropy", bound=0.375)
    open_ = torch.ones(1, 4, dtype=torch.bool)
    sure = Sureness(torch.zeros(1, 4), None, entropy)
    taken = accept(stage, -entropy, open_, torch.tensor([4]), sure)
    assert taken.tolist() == [[True, True, True, False]]


def test_halving_runs_takes_the_logarithm_of_the_length():
    stage = Stage(num_passes=0, order="middle", quota="one_per_run")
    for n in (1, 2, 3, 7, 8, 255):
        open_, passes = torch.ones(1, n, dtype=torch.bool), 0
        while open_.any():
            sure, none = Sureness(torch.zeros(1, n)), torch.zeros(1)
            score = order_score(stage, sure, open_, none, torch.zeros(1, n))
            taken = accept(stage, score, open_, torch.tensor([0]), sure)
            assert not (taken[:, 1:] & taken[:, :-1]).any()
            open_, passes = open_ & ~taken, passes + 1
        assert passes == n.bit_length()
