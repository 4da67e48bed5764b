"""Our model as the harness calls it: text in, what the scorer says of its ids out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'diffurefill[eval]'")

from diffurefill.config import Stage, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer, train_tokenizer
from diffurefill.decode.canvas import Specials
from diffurefill.decode.generate import generate
from diffurefill.evaluate.harness.lm import DiffusionLM, cut_at_stops
from diffurefill.evaluate.likelihood.scorer import Scorer, ScoringModel, score, score_rolling
from tests.fakes import BigramDenoiser, OracleDenoiser
from tests.tiny import TEXT

GREEDY = (Stage(num_passes=0, tokens_per_pass=1, temperature=(0.0, 0.0), order="left_to_right"),)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT] * 3, 300)


def build(tokenizer: Tokenizer, denoiser=None, max_tokens: int = 40, **scorer) -> DiffusionLM:
    t = tokenizer
    size = t.num_pieces + 2
    specials = Specials(t.bos_id, t.eos_id, t.mask_id, t.pad_id, t.emittable(size))
    if denoiser is None:
        denoiser = BigramDenoiser(size)
    model = ScoringModel(denoiser, specials, max_tokens, torch.device("cpu"))

    def fill(canvas, seeds):
        return generate(denoiser, canvas, GREEDY, specials, seeds=seeds)

    return DiffusionLM(model, tokenizer, Scorer(**scorer), fill)


def requests(*arguments) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_a_continuation_is_what_stands_behind_the_context_s_tokens(tokenizer: Tokenizer) -> None:
    lm = build(tokenizer)
    found = lm.loglikelihood(requests(("the quick ", "brown fox"), ("", "the lazy dog")))
    context, whole = tokenizer.encode("the quick"), tokenizer.encode("the quick brown fox")
    pairs = [(context, whole[len(context) :]), ([], tokenizer.encode("the lazy dog"))]
    expected = score(lm.model, pairs, Scorer()).scores
    assert found == [tuple(one) for one in expected]
    assert lm.cost.rows_asked == sum(len(continuation) for _, continuation in pairs)


def test_a_continuation_that_melts_into_the_context_is_not_certain(tokenizer: Tokenizer) -> None:
    """Encoded together the two may be one token less: nothing would be left to score."""
    lm = build(tokenizer)
    (found,) = lm._loglikelihood_tokens([(("the quic", "k"), tokenizer.encode("the quick"), [])])
    assert found[0] < 0.0


def test_rolling_adds_up_windows_by_the_chain_rule(tokenizer: Tokenizer) -> None:
    lm = build(tokenizer, max_tokens=8)
    (found,) = lm.loglikelihood_rolling(requests((TEXT,)))
    expected, _ = score_rolling(lm.model, [tokenizer.encode(TEXT)], Scorer())
    assert found == pytest.approx(expected[0])
    with pytest.raises(UserError, match="chain"):
        build(tokenizer, max_tokens=8, method="elbo").loglikelihood_rolling(requests((TEXT,)))


def test_answers_are_written_and_cut_at_stop_strings(tokenizer: Tokenizer) -> None:
    text = torch.tensor(
        [tokenizer.bos_id, *tokenizer.encode("the quick brown fox jumps over a lazy")]
    )
    ends = torch.cat([text, torch.full((40,), tokenizer.eos_id)])
    lm = build(tokenizer, OracleDenoiser(ends, tokenizer.num_pieces + 2))
    options = {"until": ["jumps", "lazy"], "max_gen_toks": 20}
    whole, cut = lm.generate_until(
        requests(("the quick", {"max_gen_toks": 20}), ("the quick", options))
    )
    assert whole == " brown fox jumps over a lazy"
    assert cut == " brown fox "


def test_an_answer_too_long_for_a_row_takes_half_of_it(tokenizer: Tokenizer) -> None:
    lm = build(tokenizer, max_tokens=12)
    options = {"max_gen_toks": 99, "until": []}
    batches = list(lm._generation_batches(requests((TEXT, options), ("the", options))))
    assert [number for number, _ in batches] == [6]
    assert sorted(len(prompt) for _, prompt in batches[0][1]) == [len(tokenizer.encode("the")), 5]


def test_stops_are_one_or_several() -> None:
    assert cut_at_stops("a b\n\nc", "\n\n") == "a b"
    assert cut_at_stops("a b c", ["c", "b", ""]) == "a "
    assert cut_at_stops("a", []) == "a"


def test_the_prefix_of_an_empty_context_is_bos(tokenizer: Tokenizer) -> None:
    lm = build(tokenizer)
    assert (lm.prefix_token_id, lm.eot_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert np.isfinite(lm.loglikelihood(requests(("", "fox")))[0][0])
