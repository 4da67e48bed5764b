"""A screen in front of the chain rule: what it may decide, and what is scored exactly."""

import numpy as np
import pytest

from diffurefill.config import UserError
from diffurefill.evaluate.likelihood import screen
from diffurefill.evaluate.likelihood.scorer import Scorer, score, score_rolling
from diffurefill.evaluate.likelihood.screen import Item, margin
from diffurefill.evaluate.likelihood.texts import Score
from tests.evaluate.likelihood.frozen import frozen_chain
from tests.evaluate.likelihood.toys import V, scoring, sharp_transformer, some_pairs
from tests.fakes import BigramDenoiser

WIDE = 24
PAIRS = some_pairs(np.random.default_rng(5), WIDE, 40)
ITEMS = [Item(tuple(range(i, i + 4))) for i in range(0, 40, 4)]
MODEL = sharp_transformer(WIDE, layers=2)


def screened(pairs, items, rescore=0.2, **more):
    scorer = Scorer(screen="two_stream", rescore=rescore)
    return score(scoring(MODEL, WIDE, **more), pairs, scorer, items=items)


def test_the_closest_items_are_exact_and_the_others_those_of_the_frozen_chain() -> None:
    found, exact = screened(PAIRS, ITEMS), score(scoring(MODEL, WIDE), PAIRS, Scorer())
    frozen = [sum(frozen_chain(MODEL, *pair)) for pair in PAIRS]
    order = sorted(ITEMS, key=lambda item: np.diff(np.sort([frozen[i] for i in item.choices]))[-1])
    close = {i for item in order[:2] for i in item.choices}
    assert found.approximate == set(range(40)) - close
    for i, one in enumerate(found.scores):
        expected = exact.scores[i].log_likelihood if i in close else frozen[i]
        assert one.log_likelihood == pytest.approx(expected, abs=1e-4)
    assert found.cost.forward_tokens < exact.cost.forward_tokens


def test_neither_batch_nor_order_changes_a_score_or_what_is_approximate() -> None:
    expected = screened(PAIRS, ITEMS)
    shuffled = np.random.default_rng(1).permutation(len(PAIRS)).tolist()
    place = {i: k for k, i in enumerate(shuffled)}
    items = [Item(tuple(place[i] for i in item.choices)) for item in reversed(ITEMS)]
    for batch_tokens in (1, 60, 10_000):
        found = screened([PAIRS[i] for i in shuffled], items, batch_tokens=batch_tokens)
        assert {shuffled[k] for k in found.approximate} == expected.approximate
        for where, one in zip(shuffled, found.scores, strict=True):
            limit = 1e-5 * len(PAIRS[where][1])
            other = expected.scores[where]
            assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=limit)
            assert one.is_greedy == other.is_greedy


@pytest.mark.parametrize(
    ("rescore", "num_exact"), [(0, 0), (0.01, 1), (0.3, 3), (0.31, 4), (1, 10)]
)
def test_a_share_of_the_items_is_rounded_up(rescore: float, num_exact: int) -> None:
    assert len(screened(PAIRS, ITEMS, rescore).approximate) == 40 - 4 * num_exact


def test_items_that_are_exact_anyway_take_none_of_the_share() -> None:
    """Their choices are as close as can be: were they counted, they would be the ones chosen."""
    letters = [([4, i], [token]) for i in range(5, 9) for token in (6, 6)]
    items = [Item((i, i + 1)) for i in range(0, 8, 2)]
    moved = [Item(tuple(8 + i for i in item.choices)) for item in ITEMS[:2]]
    found = screened([*letters, *PAIRS[:8]], [*items, *moved], rescore=0.5)
    assert len(found.approximate) == 4


def test_all_of_them_scored_again_are_the_chain_rule_s() -> None:
    found, exact = screened(PAIRS, ITEMS, 1.0), score(scoring(MODEL, WIDE), PAIRS, Scorer())
    for one, other in zip(found.scores, exact.scores, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)


def test_a_margin_is_that_of_the_item_s_metric() -> None:
    scores = [Score(value, False) for value in (-12.0, -10.0, -11.0)]
    by_place = dict(enumerate(scores))
    assert margin(Item((0, 1, 2)), by_place) == pytest.approx(1.0)
    assert margin(Item((0, 1, 2), (12, 5, 5)), by_place) == pytest.approx(1.0)
    assert margin(Item((0, 1), (12, 5)), by_place) == pytest.approx(1.0)
    assert margin(Item((0, 2), (12, 5)), by_place) == pytest.approx(2.2 - 1.0)


def test_what_a_screen_is_not_for_is_scored_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "MAX_TEXT_TOKENS", 20)
    long, short = [5, 6] * 4, [4, 7]
    pairs = [
        ([4], short), ([5], short),  # a choice alone; in no item
        ([4, 5], [6]), ([4, 5], [7]),  # one token each
        ([6], long), ([6], short),  # a choice too long for a tree
        ([7], []), ([7], short),  # an empty choice
        ([8], [5] * 90), ([8], short),  # a choice too long for a row
        ([9], [5, 7]), ([9], [7]),  # screened; the second is exact all the same
    ]  # fmt: skip
    items = [Item((0,)), *(Item((i, i + 1)) for i in range(2, 12, 2))]
    found = screened(pairs, items, rescore=0.0)
    assert found.approximate == {10}
    exact = score(scoring(MODEL, WIDE), pairs, Scorer())
    for i, (one, other) in enumerate(zip(found.scores, exact.scores, strict=True)):
        if i != 10:
            assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)


def test_without_items_nothing_is_approximate() -> None:
    found, exact = screened(PAIRS, ()), score(scoring(MODEL, WIDE), PAIRS, Scorer())
    assert (found.scores, found.cost) == (exact.scores, exact.cost)
    _, scored = score_rolling(scoring(MODEL, WIDE), [[4, 5] * 9], Scorer(screen="two_stream"))
    assert not scored.approximate


def test_progress_never_passes_the_number_of_requests() -> None:
    told: list[tuple[int, int]] = []
    scorer = Scorer(screen="two_stream")
    score(scoring(MODEL, WIDE), PAIRS, scorer, lambda *counts: told.append(counts), ITEMS)
    assert told
    assert all(0 < done <= total == 40 for done, total in told)


@pytest.mark.parametrize(
    "fields",
    [
        {"screen": "one_stream"},
        {"rescore": 1.5},
        {"rescore": -0.1},
        {"screen": "two_stream", "method": "elbo"},
        {"screen": "two_stream", "tokens_per_pass": 2},
        {"screen": "two_stream", "guidance": 1.0},
    ],
)
def test_a_screen_that_cannot_be_is_refused(fields) -> None:
    with pytest.raises(UserError, match=r"screen|rescore"):
        Scorer(**fields)


def test_a_screen_needs_a_model_whose_insides_are_known() -> None:
    scorer = Scorer(screen="two_stream")
    with pytest.raises(UserError, match="screen"):
        score(scoring(BigramDenoiser(V)), PAIRS[:4], scorer, items=ITEMS[:1])
    with pytest.raises(UserError, match="one likelihood"):
        score(scoring(MODEL, WIDE, causal=True), PAIRS[:4], scorer, items=ITEMS[:1])
