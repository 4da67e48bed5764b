import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import Stage
from diffurefill.decode.order import choose, order_score
from tests.decode.plain import greedy_gap

ROWS = st.integers(1, 24).flatmap(
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


def test_gap_one_puts_no_constraint():
    everything = torch.ones(1, 9, dtype=torch.bool)
    assert choose(torch.zeros(1, 9), everything, torch.tensor([9]), 1).all()


def test_equal_scores_go_by_position():
    everything = torch.ones(1, 6, dtype=torch.bool)
    chosen = choose(torch.zeros(1, 6), everything, torch.tensor([2]), 2)
    assert chosen[0].nonzero().flatten().tolist() == [0, 2]


def test_left_to_right_ignores_confidence_and_noise():
    stage = Stage(order="left_to_right", order_noise=9.0)
    score = order_score(stage, torch.randn(2, 5), torch.full((2,), 9.0), torch.randn(2, 5))
    assert (score.diff(dim=1) < 0).all()


def test_order_noise_is_scaled_per_row():
    confidence, gumbel = torch.zeros(2, 3), torch.ones(2, 3)
    score = order_score(Stage(), confidence, torch.tensor([0.0, 2.5]), gumbel)
    assert score.tolist() == [[0.0] * 3, [2.5] * 3]


@pytest.mark.parametrize("share", [1.0, 2.0])
def test_gumbel_order_draws_the_first_in_proportion_to_confidence(share):
    """With noise 1 the first accepted position is a draw from softmax(confidence)."""
    N = 20_000
    confidence = torch.tensor([[0.0, share]]).expand(N, 2)
    uniform = torch.rand(N, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gumbel = -(-uniform.log()).log()
    score = order_score(Stage(), confidence, torch.ones(N), gumbel.float())
    first = choose(score, torch.ones(N, 2, dtype=torch.bool), torch.ones(N).long(), 1)
    expected = torch.sigmoid(torch.tensor(share)).item()
    assert abs(first[:, 1].float().mean().item() - expected) < 4 * (0.25 / N) ** 0.5
