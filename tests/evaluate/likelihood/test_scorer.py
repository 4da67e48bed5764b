"""Many requests at once: shared rows, batches, limits; the numbers stay those of one alone."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import ModelConfig, UserError
from diffurefill.evaluate.likelihood import plans
from diffurefill.evaluate.likelihood.scorer import Scorer, score, score_rolling
from diffurefill.evaluate.likelihood.texts import lay_out, rolling_windows
from diffurefill.model.denoiser import Denoiser
from tests.evaluate.likelihood.toys import (
    V,
    plain_fixed_order,
    scoring,
    sharp_transformer,
    some_pairs,
)
from tests.fakes import BOS, EOS, MASK, BigramDenoiser, TinyDenoiser

WIDE = 24


@pytest.fixture(scope="module")
def transformer() -> Denoiser:
    return sharp_transformer(WIDE, layers=2)


METHODS = ["chain", "right_to_left", "confidence", "margin", "entropy", "elbo"]


@pytest.mark.parametrize("method", METHODS)
def test_neither_batch_nor_order_changes_a_score(method, transformer) -> None:
    """The tolerance of the docstring: 1e-5 nats a token in float32."""
    pairs = some_pairs(np.random.default_rng(0), WIDE)
    scorer = Scorer(method=method, samples=5)
    expected = score(scoring(transformer, WIDE), pairs, scorer).scores
    assert all(-60 < one.log_likelihood < 0 for one in expected)
    shuffled = np.random.default_rng(1).permutation(len(pairs))
    for batch_tokens in (1, 40, 10_000):
        model = scoring(transformer, WIDE, batch_tokens=batch_tokens)
        found = score(model, [pairs[i] for i in shuffled], scorer).scores
        for where, one in zip(shuffled, found, strict=True):
            limit = 1e-5 * len(pairs[where][1])
            assert one.log_likelihood == pytest.approx(expected[where].log_likelihood, abs=limit)
            assert one.is_greedy == expected[where].is_greedy
    alone = [score(scoring(transformer, WIDE), [pair], scorer).scores[0] for pair in pairs]
    for one, other, (_, tokens) in zip(alone, expected, pairs, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-5 * len(tokens))


def test_the_transformer_scores_as_a_pass_per_token_does(transformer) -> None:
    pairs = some_pairs(np.random.default_rng(3), WIDE, 8)
    found = score(scoring(transformer, WIDE), pairs, Scorer()).scores
    with torch.inference_mode():
        for one, (context, tokens) in zip(found, pairs, strict=True):
            plain = plain_fixed_order(transformer, context, tokens, range(len(tokens)))
            assert one.log_likelihood == pytest.approx(plain, abs=1e-4)


def test_windows_of_plans_change_nothing(transformer, monkeypatch) -> None:
    pairs = some_pairs(np.random.default_rng(4), WIDE)
    expected = score(scoring(transformer, WIDE), pairs, Scorer()).scores
    monkeypatch.setattr(plans, "WINDOW_TOKENS", 50)
    found = score(scoring(transformer, WIDE), pairs, Scorer()).scores
    assert [one.log_likelihood for one in found] == pytest.approx(
        [one.log_likelihood for one in expected], abs=1e-4
    )


# --- what is shared -------------------------------------------------------------------------------


def test_one_token_answers_cost_one_row_for_all_choices() -> None:
    context = [4, 5, 6]
    found = score(scoring(BigramDenoiser(V)), [(context, [t]) for t in (4, 5, 6)], Scorer())
    assert (found.cost.rows_asked, found.cost.rows_read) == (3, 1)
    assert found.cost.forward_tokens == 5
    assert found.cost.num_forward_passes == 1


def test_common_beginnings_are_read_once() -> None:
    """Choices of one length share a row for each token that they begin alike, and the first."""
    choices = [[4, 5, 6, 4], [4, 5, 5, 4], [6, 5, 5, 4]]
    found = score(scoring(BigramDenoiser(V)), [([5], c) for c in choices], Scorer())
    assert (found.cost.rows_asked, found.cost.rows_read) == (12, 12 - 2 - 1 - 1)


def test_rows_of_one_length_go_through_together_and_none_is_padded() -> None:
    class Watching(BigramDenoiser):
        def forward(self, canvas, doc_ids=None, at=None):
            assert doc_ids is None
            shapes.append(tuple(canvas.shape))
            wanted.append(int(at.sum()))
            return super().forward(canvas, doc_ids, at)

    shapes: list[tuple[int, int]] = []
    wanted: list[int] = []
    score(scoring(Watching(V)), [([5], [4, 5, 6]), ([6, 6], [4, 5])], Scorer())
    assert (shapes, wanted) == ([(5, 5)], [5])


def test_guidance_reads_each_row_again_without_its_context() -> None:
    pairs = [([4, 5], [6, 6]), ([5, 5], [6, 6])]
    found = score(scoring(BigramDenoiser(V)), pairs, Scorer(guidance=0.7))
    assert found.cost.rows_read == 8
    for (context, tokens), one in zip(pairs, found.scores, strict=True):
        expected = plain_guided(BigramDenoiser(V), context, tokens, 0.7)
        assert one.log_likelihood == pytest.approx(expected, abs=1e-5)
    plain = score(scoring(BigramDenoiser(V)), pairs, Scorer())
    assert plain.scores[0].log_likelihood != pytest.approx(found.scores[0].log_likelihood, abs=0.01)


def plain_guided(model: TinyDenoiser, context, tokens, w: float) -> float:
    total, start = 0.0, 1 + len(context)
    for i in range(len(tokens)):
        tail = [*tokens[:i], *[MASK] * (len(tokens) - i)]
        c = model(torch.tensor([[BOS, *context, *tail]]))[0, start + i]
        u = model(torch.tensor([[BOS, *[MASK] * len(context), *tail]]))[0, start + i]
        total += float((u + (1 + w) * (c - u)).log_softmax(dim=0)[tokens[i]])
    return total


def test_an_autoregressive_twin_takes_one_row_a_text() -> None:
    config = ModelConfig(vocab_size=WIDE, width=32, layers=2, heads=2, ffn_width=32, causal=True)
    twin = Denoiser(config)
    twin.init_weights(torch.Generator().manual_seed(0))
    model = scoring(twin.eval(), WIDE, causal=True)
    pairs = some_pairs(np.random.default_rng(0), WIDE, 8)
    found = score(model, pairs, Scorer())
    assert found.cost.rows_asked == len(pairs)
    with torch.inference_mode():
        for (context, tokens), one in zip(pairs, found.scores, strict=True):
            ids = torch.tensor([[BOS, *context, *tokens]])
            log_probs = twin(ids)[0].log_softmax(dim=1)
            places = range(len(context), len(context) + len(tokens))
            expected = sum(float(log_probs[p, t]) for p, t in zip(places, tokens, strict=True))
            assert one.log_likelihood == pytest.approx(expected, abs=1e-4)
    spared = Scorer(right_masks=8, check_greedy=False)
    assert score(model, pairs, spared).scores == found.scores, "it sees nothing behind"
    document = [list(range(4, 24))]
    assert score_rolling(model, document, spared)[0] == score_rolling(model, document, Scorer())[0]
    for other in ({"method": "elbo"}, {"tokens_per_pass": 2}, {"guidance": 0.5}):
        with pytest.raises(UserError, match="one likelihood"):
            score(model, pairs, Scorer(**other))


# --- limits ---------------------------------------------------------------------------------------


def test_a_long_context_is_cut_from_the_left_and_keeps_bos() -> None:
    text = lay_out(range(10, 20), [5, 6], bos_id=BOS, max_tokens=6, right_masks=1)
    assert text is not None
    assert text.ids.tolist() == [BOS, 18, 19, 5, 6]
    assert (text.first, text.is_truncated) == (3, True)
    assert len(text.hidden(MASK, 1)) == 6
    whole = lay_out([BOS, 10, 11], [5], bos_id=BOS, max_tokens=6)
    assert whole is not None
    assert (whole.ids.tolist(), whole.is_truncated) == ([BOS, 10, 11, 5], False)


def test_a_continuation_longer_than_a_row_never_wins(caplog) -> None:
    pairs = [([4], [5] * 8), ([4], [5] * 7), ([4] * 30, [6])]
    with caplog.at_level(logging.WARNING):
        found = score(scoring(BigramDenoiser(V), max_tokens=8), pairs, Scorer())
    assert found.scores[0] == (-math.inf, False)
    assert all(math.isfinite(one.log_likelihood) for one in found.scores[1:])
    assert (found.num_too_long, found.num_truncated) == (1, 2)
    assert "never win" in caplog.text


def test_an_empty_continuation_is_certain() -> None:
    assert score(scoring(BigramDenoiser(V)), [([4], [])], Scorer()).scores == [(0.0, True)]
    assert score(scoring(BigramDenoiser(V)), [], Scorer()).scores == []


def test_a_model_of_whole_documents_wants_room_behind_for_its_end() -> None:
    """It has learned that a row ends with a sentence's end and EOS, and says so where the row ends,
    whatever stands before: a right answer is its first choice only with room behind."""
    answer, stop = 5, 6

    class Whole(TinyDenoiser):
        def logits(self, canvas, doc_ids):
            out = torch.zeros((*canvas.shape, V))
            out[:, :, answer] = 4.0
            out[:, -2, stop], out[:, -1, EOS] = 9.0, 9.0
            return out

    flags = [
        score(scoring(Whole()), [([4], [answer])], Scorer(right_masks=k)).scores[0].is_greedy
        for k in (0, 1, 2, 8)
    ]
    assert flags == [False, False, True, True]


def test_right_masks_tell_the_model_of_a_longer_text() -> None:
    model = BigramDenoiser(V)
    pair = [([4], [5, 6])]
    found = score(scoring(model), pair, Scorer(right_masks=2)).scores[0]
    longer = [([4], [5, 6, t, s]) for t in range(V) for s in range(V)]
    both = score(scoring(model), longer, Scorer()).scores
    expected = np.logaddexp.reduce([one.log_likelihood for one in both])
    assert found.log_likelihood == pytest.approx(expected, abs=1e-4)


@settings(max_examples=30)
@given(st.lists(st.integers(4, 6), max_size=30), st.integers(3, 9))
def test_rolling_windows_predict_every_token_once(tokens: list[int], max_tokens: int) -> None:
    windows = rolling_windows(tokens, max_tokens)
    assert [t for _, part in windows for t in part] == tokens
    assert all(1 + len(c) + len(part) <= max_tokens for c, part in windows)
    assert all(len(c) == 1 for c, _ in windows[1:])


def test_a_rolling_score_is_the_sum_of_its_windows() -> None:
    model = scoring(BigramDenoiser(V), max_tokens=6)
    documents = [[4, 5, 6] * 5, [5], []]
    sums, scored = score_rolling(model, documents, Scorer())
    for tokens, total in zip(documents, sums, strict=True):
        parts = score(model, rolling_windows(tokens, 6), Scorer()).scores
        assert total == pytest.approx(sum(p.log_likelihood for p in parts), abs=1e-5)
    assert scored.num_too_long == 0
    with pytest.raises(UserError, match="chain"):
        score_rolling(model, documents, Scorer(method="elbo"))


@pytest.mark.parametrize("right_masks", [4, 5, 6, 99])
def test_a_rolling_score_without_room_is_refused_and_never_perfect(right_masks: int) -> None:
    model = scoring(BigramDenoiser(V), max_tokens=6)
    with pytest.raises(UserError, match="fewer right_masks"):
        score_rolling(model, [[4, 5, 6]], Scorer(right_masks=right_masks))


def test_weights_that_give_no_numbers_are_refused() -> None:
    class Broken(TinyDenoiser):
        def logits(self, canvas, doc_ids):
            return torch.full((*canvas.shape, V), math.nan)

    half = scoring(Broken(), dtype=torch.bfloat16)
    for model, way_out in ((scoring(Broken()), "other weights"), (half, "--dtype float32")):
        with pytest.raises(UserError, match=f"not finite in [a-z]*float[1236]*: use {way_out}"):
            score(model, [([4], [5])], Scorer())


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "chian"},
        {"samples": 0},
        {"tokens_per_pass": 0},
        {"right_masks": -1},
        {"guidance": math.nan},
        {"guidance": math.inf},
        {"guidance": "x"},
        {"rescore": math.nan},
        {"method": "elbo", "tokens_per_pass": 2},
    ],
)
def test_a_scorer_that_cannot_be_is_refused(fields) -> None:
    with pytest.raises(UserError):
        Scorer(**fields)


def test_the_name_tells_all_that_changes_the_figures() -> None:
    assert Scorer(seed=3, check_greedy=False, rescore=0.5).name == "chain"
    assert Scorer(samples=4).name == "chain", "samples are the elbo's"
    guided = Scorer(method="margin", tokens_per_pass=2, right_masks=8, guidance=0.5)
    assert guided.name == "margin, 2 tokens a pass, 8 MASKs behind, guidance 0.5"
    assert Scorer(screen="two_stream").name == "chain, two_stream screen"
    assert Scorer(method="elbo").name == "elbo, 32 samples"
