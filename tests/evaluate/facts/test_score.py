"""Figures of the fact probe on denoisers whose answers are known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from diffurefill.config import ModelConfig, UserError
from diffurefill.decode.canvas import Specials
from diffurefill.evaluate.facts.probe import Fact, FactProbe
from diffurefill.evaluate.facts.score import FactScores, score_facts
from diffurefill.model.denoiser import Denoiser
from tests.fakes import BOS, EOS, MASK, PAD, BigramDenoiser, TableDenoiser, TinyDenoiser

V = 64
SPECIALS = Specials(BOS, EOS, MASK, PAD, np.isin(np.arange(V), [BOS, MASK, PAD], invert=True))


def decode(ids: Sequence[int]) -> str:
    """An id is a word: `w7`."""
    return "".join(f" w{i}" for i in ids if i > PAD)


def make_facts(num_facts: int) -> FactProbe:
    """Sentences of random ids; the answer has one to three tokens and one token follows it."""
    rng = np.random.default_rng(0)
    facts = []
    for n in range(num_facts):
        stem, length = rng.integers(4, V, 3 + n % 4).tolist(), 1 + n % 3
        words = rng.permutation(np.arange(6, V)).tolist()
        answers = [tuple(words[at : at + length]) for at in range(0, 4 * length, length)]
        ids = (BOS, *stem, *answers[0], 5, EOS)
        start = 1 + len(stem)
        facts.append(
            Fact(
                relation=("sport", "genre")[n % 2],
                subject=str(n),
                text="",
                accepted=(decode(answers[0]).strip(),),
                ids=ids,
                start=start,
                stop=start + length,
                distractors=tuple(answers[1:]),
            )
        )
    return FactProbe(facts, "v")


def scored(denoiser: object, probe: FactProbe, batch_rows: int = 64) -> FactScores:
    return score_facts(
        denoiser,
        probe,
        specials=SPECIALS,
        device=torch.device("cpu"),
        decode=decode,
        batch_rows=batch_rows,
    )


class KnowsFacts(TinyDenoiser):
    """Sure of `texts[i]` in a row that begins as fact i does."""

    def __init__(self, probe: FactProbe, texts: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.rows = {
            fact.ids[: fact.start]: text for fact, text in zip(probe.facts, texts, strict=True)
        }

    def logits(self, canvas: Tensor, doc_ids: Tensor) -> Tensor:
        T, out = canvas.shape[1], []
        for row in canvas.tolist():
            text = next(t for stem, t in self.rows.items() if tuple(row[: len(stem)]) == stem)
            padded = [*text, *[EOS] * T][:T]
            out.append(30.0 * torch.nn.functional.one_hot(torch.tensor(padded), V).float())
        return torch.stack(out)


def test_an_oracle_knows_everything() -> None:
    probe = make_facts(24)
    found = scored(KnowsFacts(probe, [fact.ids for fact in probe.facts]), probe)
    assert all(found.choice)
    assert all(found.exact)
    assert all(found.contained)
    assert max(found.nll) < 1e-6
    assert found.summary()["choice"]["mean"] == 1.0


def test_who_believes_a_wrong_answer_gets_nothing() -> None:
    probe = make_facts(24)
    texts = [(*f.ids[: f.start], *f.distractors[1], *f.ids[f.stop :]) for f in probe.facts]
    found = scored(KnowsFacts(probe, texts), probe)
    assert not any(found.choice)
    assert not any(found.exact)
    assert found.decoded[0] == decode(probe.facts[0].distractors[1]).strip()


def test_ties_are_not_right_and_the_uniform_nll_is_the_vocabulary_s() -> None:
    found = scored(TableDenoiser(torch.zeros(40, V)), make_facts(24))
    assert not any(found.choice)
    assert found.nll == pytest.approx([math.log(V)] * 24)
    assert found.token_nll == pytest.approx(math.log(V))


def test_a_model_without_knowledge_chooses_by_chance() -> None:
    found = scored(BigramDenoiser(V), make_facts(600))
    interval = found.summary()["choice"]
    assert interval["low"] < 0.25 < interval["high"]


def test_figures_follow_from_the_table_by_hand() -> None:
    """One position, four answers with log probabilities in a known order."""
    fact = Fact("sport", "x", "", ("w10", "w11"), (BOS, 9, 10, 5, EOS), 2, 3, ((11,), (12,), (13,)))
    table = torch.zeros(40, V)
    table[2, 10], table[2, 11] = 1.0, 2.0
    found = scored(TableDenoiser(table), FactProbe([fact], "v"))
    total = V - 2 + math.e + math.e**2
    assert found.nll == pytest.approx([math.log(total) - 1.0])
    assert found.choice == [False]
    assert found.decoded == ["w11"]
    assert found.exact == [True]  # an accepted one, though not the first
    assert found.contained == [True]  # w11 comes first in what is written freely


def test_the_batch_makes_no_difference() -> None:
    probe, denoiser = make_facts(30), BigramDenoiser(V)
    one, many = scored(denoiser, probe, 1), scored(denoiser, probe, 16)
    assert one.nll == pytest.approx(many.nll, abs=1e-5)
    assert (one.choice, one.decoded, one.continued) == (many.choice, many.decoded, many.continued)


def test_relations_and_pooled_tokens_add_up() -> None:
    found = scored(BigramDenoiser(V), make_facts(30))
    by = found.by_relation()
    assert {name: about["facts"] for name, about in by.items()} == {"genre": 15, "sport": 15}
    mean = sum(found.nll) / 30
    assert (by["genre"]["nll"] + by["sport"]["nll"]) / 2 == pytest.approx(mean)
    assert found.token_nll != pytest.approx(mean)


def test_the_digest_changes_with_any_part_of_any_fact() -> None:
    probe = make_facts(4)
    assert probe.digest == make_facts(4).digest
    assert FactProbe(probe.facts[:-1], "v").digest != probe.digest
    assert FactProbe(list(reversed(probe.facts)), "v").digest != probe.digest


def test_the_twin_is_not_asked() -> None:
    twin = Denoiser(
        ModelConfig(vocab_size=V, width=16, layers=1, heads=2, ffn_width=16, causal=True)
    )
    with pytest.raises(UserError, match="causal"):
        scored(twin, make_facts(2))
