"""What the demo lets its model write, on a model of seconds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diffurefill.config import DRAFT, HELD_OUT, REFILL
from diffurefill.demo.writing import (
    PYTHON_INFILL,
    _prompts,
    held_out_statistics,
    sample_statistics,
    write_samples,
)
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.loading import LoadedModel, load
from tests.tiny import WORDS, tiny_config, write_corpus


def trained_on(corpus: Path) -> LoadedModel:
    config = tiny_config(corpus)
    config = replace(config, data=replace(config.data, row_length=160, num_slots=1))
    train_alone(corpus.parent / "t", config, 2, lambda line: None)
    return load(str(corpus.parent / "t"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return trained_on(write_corpus(tmp_path_factory.mktemp("writing"), num_documents=1200))


@pytest.mark.parametrize("is_python", [True, False])
def test_samples_keep_what_was_given_and_say_what_refilling_did(
    model: LoadedModel, is_python: bool
) -> None:
    samples = write_samples(model, is_python=is_python)
    assert len(samples) == 4
    for sample in samples:
        assert sample.num_forward_passes == 20
        assert sample.num_changed > 0
        assert sample.draft != sample.text
        assert len(sample.frames) == 20
    if is_python:
        before, after = PYTHON_INFILL.split("[MASK*14]")
        assert samples[-1].text.startswith(before)
        assert samples[-1].text.endswith(after)
        assert samples[0].text.startswith("def read_lines(path, ")


def test_books_of_which_no_held_out_row_is_the_beginning_are_continued_too(tmp_path: Path) -> None:
    corpus = tmp_path / "books.jsonl"
    books = [" ".join(WORDS[i * i % (7 + n) % 16] for i in range(12_000)) for n in range(12)]
    corpus.write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    model = trained_on(corpus)
    assert model.tokenizer.bos_id not in model.probe.ids[:, 0]
    samples = write_samples(model, is_python=False)
    assert [s.title.split()[0] for s in samples] == ["continue"] * 3 + ["fill"]


def test_a_prompt_ends_with_its_document(model: LoadedModel) -> None:
    doc_ids = np.where(np.arange(160) < 4, 0, 1)[None].repeat(len(model.probe.ids), 0)
    probes = {HELD_OUT: replace(model.probe, doc_ids=doc_ids)}
    assert {len(p) for p in _prompts(replace(model, probes=probes), False)} == {3}


def test_samples_repeat_with_the_seed(model: LoadedModel) -> None:
    first, again = (write_samples(model, is_python=True, seed=7) for _ in range(2))
    assert [s.text for s in first] == [s.text for s in again]


def test_text_statistics_are_shares_and_an_entropy(model: LoadedModel) -> None:
    for found in (sample_statistics(model, (DRAFT, REFILL)), held_out_statistics(model)):
        assert 0.0 <= found["doubled_share"] <= 1.0
        assert 0.0 < found["distinct_2"] <= 1.0
        assert 0.0 < found["own_ce"] < 20.0
