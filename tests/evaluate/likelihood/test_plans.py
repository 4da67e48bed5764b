"""Likelihoods beside enumeration: every order, every mask, every text of a toy distribution."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.evaluate.likelihood.passes import Reader, sureness_of
from diffurefill.evaluate.likelihood.plans import (
    elbo,
    fixed_order,
    run_plans,
    stratified_masks,
    surest_first,
)
from diffurefill.evaluate.likelihood.scorer import Scorer, score
from diffurefill.evaluate.likelihood.texts import lay_out
from tests.evaluate.likelihood.toys import (
    CPU,
    TOKENS,
    JointDenoiser,
    LeftDenoiser,
    V,
    plain_elbo,
    plain_fixed_order,
    scoring,
)
from tests.fakes import BOS, MASK, BigramDenoiser, TableDenoiser

CONTEXT = (4, 6)


def reader(denoiser: object, **more) -> Reader:
    return Reader(denoiser, MASK, V, CPU, **more)


def text(tokens, context=CONTEXT):
    return lay_out(context, tokens, bos_id=BOS, max_tokens=64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("confidence", [math.log(0.5), math.log(0.6)]),
        ("margin", [0.5 - 0.5, 0.6 - 0.2]),
        ("entropy", [math.log(0.5), 0.6 * math.log(0.6) + 0.4 * math.log(0.2)]),
    ],
)
def test_how_sure_a_model_is_by_each_measure(kind, expected) -> None:
    """By entropy the first is surer, by the others the second."""
    logits = torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.2, 0.2]]).log() + 7.0
    assert sureness_of(logits, kind).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("tokens", [(4,), (6, 5), (5, 4, 6), (4, 4, 5)])
def test_every_order_of_a_consistent_model_gives_the_joint_probability(tokens) -> None:
    model = JointDenoiser(len(tokens))
    expected = model.log_prob(tokens)
    for method in ("chain", "right_to_left", "confidence", "margin", "entropy"):
        found = score(scoring(model), [(CONTEXT, tokens)], Scorer(method=method)).scores[0]
        assert found.log_likelihood == pytest.approx(expected, abs=1e-5)
    for order in itertools.permutations(range(len(tokens))):
        plan = fixed_order(text(tokens), order, mask_id=MASK)
        found = run_plans([plan], reader(model))[0]
        assert found.log_likelihood == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_order_gives_what_a_pass_per_token_gives(order) -> None:
    model, tokens = BigramDenoiser(V), (5, 4, 6)
    found = run_plans([fixed_order(text(tokens), order, mask_id=MASK)], reader(model))[0]
    expected = plain_fixed_order(model, CONTEXT, tokens, order)
    assert found.log_likelihood == pytest.approx(expected, abs=1e-5)


def test_the_mean_over_all_orders_is_the_enumerated_elbo() -> None:
    """And the mean of the likelihoods themselves is above it, as Jensen has it."""
    model, tokens = BigramDenoiser(V), (5, 4, 6, 4)
    orders = list(itertools.permutations(range(4)))
    plans = [fixed_order(text(tokens), order, mask_id=MASK) for order in orders]
    each = np.array([found.log_likelihood for found in run_plans(plans, reader(model))])
    expected = plain_elbo(model, CONTEXT, tokens)
    assert each.mean() == pytest.approx(expected, abs=1e-5)
    assert np.log(np.exp(each).mean()) > expected + 0.01
    assert each.std() > 0.1


def test_the_elbo_estimate_comes_to_the_enumerated_one() -> None:
    model, tokens = BigramDenoiser(V), (5, 4, 6)
    plans = [elbo(text(tokens), mask_id=MASK, samples=8, seed=s) for s in range(800)]
    each = np.array([found.log_likelihood for found in run_plans(plans, reader(model))])
    reach = 4 * each.std() / math.sqrt(len(each))
    assert each.mean() == pytest.approx(plain_elbo(model, CONTEXT, tokens), abs=reach)
    assert reach < 0.3


def test_the_elbo_of_a_consistent_model_is_its_likelihood_in_expectation() -> None:
    model = JointDenoiser(3)
    plans = [elbo(text((4, 6, 5)), mask_id=MASK, samples=4, seed=s) for s in range(600)]
    each = np.array([found.log_likelihood for found in run_plans(plans, reader(model))])
    reach = 4 * each.std() / math.sqrt(len(each))
    assert each.mean() == pytest.approx(model.log_prob((4, 6, 5)), abs=reach)


def test_the_chain_rule_of_a_model_that_looks_left_is_autoregressive() -> None:
    model, tokens = LeftDenoiser(), (5, 4, 4, 6, 5)
    found = score(scoring(model), [(CONTEXT, tokens)], Scorer()).scores[0]
    expected = model.autoregressive([BOS, *CONTEXT, *tokens], 1 + len(CONTEXT))
    assert found.log_likelihood == pytest.approx(expected, abs=1e-4)


def test_all_texts_of_a_length_have_probability_one_under_every_sampler() -> None:
    """Also where the model decides the order, and where it writes two at a time."""
    model = BigramDenoiser(V)
    texts = [(CONTEXT, tokens) for tokens in itertools.product(range(V), repeat=3)]
    for method in ("chain", "right_to_left", "confidence", "margin", "entropy"):
        for tokens_per_pass in (1, 2):
            scorer = Scorer(method=method, tokens_per_pass=tokens_per_pass)
            found = score(scoring(model), texts, scorer).scores
            total = sum(math.exp(one.log_likelihood) for one in found)
            assert total == pytest.approx(1.0, abs=1e-4), scorer


def test_the_surest_place_is_written_first() -> None:
    """The third place is the surest, then the first, whatever stands beside them."""
    tokens = (5, 4, 6)
    model = BigramDenoiser(V, scale=0.1)
    model.place[3:6] = 0.0
    model.place[[3, 4, 5], 5] = torch.tensor([4.0, 1.0, 9.0])
    plan = surest_first(text(tokens), mask_id=MASK)
    found = run_plans([plan], reader(model, sureness="confidence"))[0]
    expected = plain_fixed_order(model, CONTEXT, tokens, (2, 0, 1))
    assert found.log_likelihood == pytest.approx(expected, abs=1e-5)


def test_one_token_answers_agree_across_all_scorers() -> None:
    model = BigramDenoiser(V)
    pairs = [(CONTEXT, (token,)) for token in TOKENS]
    expected = score(scoring(model), pairs, Scorer()).scores
    for method in ("right_to_left", "confidence", "margin", "entropy", "elbo"):
        found = score(scoring(model), pairs, Scorer(method=method)).scores
        assert [one.log_likelihood for one in found] == pytest.approx(
            [one.log_likelihood for one in expected], abs=1e-6
        )
        assert [one.is_greedy for one in found] == [one.is_greedy for one in expected]


@pytest.mark.parametrize("method", ["chain", "confidence", "elbo"])
def test_a_uniform_model_scores_minus_n_log_v(method) -> None:
    model = TableDenoiser(torch.zeros(64, V))
    pairs = [(CONTEXT, (5,) * n) for n in (1, 3, 9)]
    found = score(scoring(model), pairs, Scorer(method=method, samples=7)).scores
    expected = [-n * math.log(V) for n in (1, 3, 9)]
    assert [one.log_likelihood for one in found] == pytest.approx(expected, abs=1e-5)


def test_the_greedy_flag_is_that_of_greedy_decoding_left_to_right() -> None:
    model = BigramDenoiser(V)
    written: list[int] = []
    for n in range(3):
        row = torch.tensor([[BOS, *CONTEXT, *written, *[MASK] * (3 - n)]])
        written.append(int(model(row)[0, 1 + len(CONTEXT) + n].argmax()))
    other = (*written[:2], next(token for token in TOKENS if token != written[2]))
    for method in ("chain", "elbo"):
        found = score(scoring(model), [(CONTEXT, written), (CONTEXT, other)], Scorer(method=method))
        assert [one.is_greedy for one in found.scores] == [True, False]
    spared = Scorer(method="elbo", check_greedy=False)
    assert not score(scoring(model), [(CONTEXT, written)], spared).scores[0].is_greedy


# --- masks of the elbo ----------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_masks_have_counts_spread_over_one_to_n(n: int, samples: int, seed: int) -> None:
    masks = stratified_masks(n, samples, np.random.default_rng(seed))
    counts = sorted(int(mask.sum()) for mask in masks)
    assert len(masks) == samples
    assert all(mask.shape == (n,) for mask in masks)
    for b, count in enumerate(counts):
        assert n * b // samples + 1 <= count <= min(n, n * (b + 1) // samples + 1)


def test_every_mask_of_a_count_is_equally_likely() -> None:
    rng = np.random.default_rng(0)
    seen: dict[tuple[bool, ...], int] = {}
    draws = 4000
    for _ in range(draws):
        for mask in stratified_masks(3, 3, rng):
            key = tuple(mask.tolist())
            seen[key] = seen.get(key, 0) + 1
    assert len(seen) == 7
    for key, count in seen.items():
        share = 1.0 if sum(key) == 3 else 1 / 3
        assert count / draws == pytest.approx(share, abs=0.04)


def test_a_pair_of_masks_hides_every_place() -> None:
    for seed in range(20):
        masks = stratified_masks(12, 8, np.random.default_rng(seed))
        for one, other in zip(masks[::2], masks[1::2], strict=True):
            assert (one | other).sum() >= 11
            assert (one & other).sum() <= 2


def test_choices_of_one_length_share_their_masks() -> None:
    model = BigramDenoiser(V)
    seen = reader(model)
    plans = [elbo(text(t), mask_id=MASK, samples=8, seed=0) for t in ((4, 5, 6, 4), (5, 5, 5, 5))]
    rows = [next(plan) for plan in plans]
    for one, other in zip(*rows, strict=True):
        assert np.array_equal(one.at, other.at)
    assert seen.cost.rows_asked == 0
