"""Our model as the harness calls it: text in, what the scorer says of its ids out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'diffurefill[eval]'")

from diffurefill.commands.scored_models import filler
from diffurefill.config import Stage, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer, train_tokenizer
from diffurefill.decode.canvas import Specials
from diffurefill.decode.generate import generate
from diffurefill.evaluate.harness.lm import DiffusionLM, cut_at_stops, items_of
from diffurefill.evaluate.likelihood.scorer import Scorer, ScoringModel, score, score_rolling
from diffurefill.evaluate.likelihood.screen import Item
from tests.evaluate.likelihood.toys import sharp_transformer
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


def request(task: str | None, doc_id: int | None, *arguments: str) -> SimpleNamespace:
    return SimpleNamespace(args=arguments, task_name=task, doc_id=doc_id)


def test_items_are_the_harness_s_and_compare_as_the_task_reports() -> None:
    """WinoGrande's choices have different contexts; HellaSwag's count by the character."""
    found = items_of(
        [
            request("winogrande", 0, "The fox", " ran."), request("winogrande", 1, "A", " sat."),
            request("winogrande", 0, "The dog", " ran."), request("winogrande", 1, "B", " sat."),
            request("hellaswag", 0, "It", " runs."), request("hellaswag", 0, "It", " sings."),
            request(None, None, "It", " runs"), request(None, None, "It", " sings"),
            request("other", 3, "It", " runs"), request("other", 3, "It", " sings"),
        ]
    )  # fmt: skip
    assert found == {
        ("winogrande", 0): Item((0, 2)), ("winogrande", 1): Item((1, 3)),
        ("hellaswag", 0): Item((4, 5), (5, 6)), (None, "It"): Item((6, 7)),
        ("other", 3): Item((8, 9)),
    }  # fmt: skip


def test_a_screen_says_which_choices_of_the_last_task_are_its_own(tokenizer: Tokenizer) -> None:
    model = sharp_transformer(tokenizer.num_pieces + 2, layers=2)
    choices = [" brown fox", " lazy dog", " fox"]
    asked = [request("t", doc, f"the quick {doc}", one) for doc in range(5) for one in choices]
    exact = build(tokenizer, model)
    lm = build(tokenizer, model, screen="two_stream", rescore=0.2)
    scored = lm.loglikelihood(asked)
    assert lm.approximate is not None
    assert list(lm.approximate) == [("t", doc) for doc in range(5)]
    rough = [flag for flags in lm.approximate.values() for flag in flags]
    by_chain = exact.loglikelihood(asked)
    assert exact.approximate is None
    same = [a[0] == pytest.approx(b[0], abs=1e-4) for a, b in zip(scored, by_chain, strict=True)]
    assert 0 < sum(rough) <= 4 * 3
    assert all(one or other for one, other in zip(rough, same, strict=True))
    assert not all(same)
    lm.loglikelihood(asked[:1])
    assert lm.approximate == {("t", 0): [False]}


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


def test_an_answer_that_ends_early_takes_no_more_passes(tokenizer: Tokenizer) -> None:
    text = torch.tensor([tokenizer.bos_id, *tokenizer.encode("the quick brown fox")])
    ends = torch.cat([text, torch.full((40,), tokenizer.eos_id)])
    lm = build(tokenizer, OracleDenoiser(ends, tokenizer.num_pieces + 2))
    lm.fill = filler(SimpleNamespace(), lm.model, "decode-left-to-right")
    assert lm.generate_until(requests(("the quick", {"max_gen_toks": 20}))) == [" brown fox"]
    written = len(tokenizer.encode("the quick brown fox")) - len(tokenizer.encode("the quick"))
    assert lm.model.denoiser.num_calls == written + 1  # EOS is the last one


def test_answers_draw_for_themselves_and_the_same_in_any_company(tokenizer: Tokenizer) -> None:
    lm = build(tokenizer)
    seen: dict[tuple[int, ...], set[int]] = {}

    def fill(canvas, seeds):
        for row, seed in zip(canvas.ids.tolist(), seeds, strict=True):
            seen.setdefault(tuple(row), set()).add(seed)
        return generate(BigramDenoiser(len(lm.model.specials.emittable)), canvas, GREEDY,
                        lm.model.specials, seeds=seeds)  # fmt: skip

    lm.fill = fill
    options = {"max_gen_toks": 3}
    lm.generate_until(requests(("the quick", options), ("lazy", options), ("lazy", options)))
    alone, twice = sorted(seen.values(), key=len)
    assert (len(alone), len(twice)) == (1, 2)
    assert not alone & twice
    before = {row: set(seeds) for row, seeds in seen.items()}
    lm.generate_until(requests(("lazy", options), ("the quick", options)))
    assert seen == before


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
