"""What the demo lets its model write, on a model of seconds."""

from dataclasses import replace

import pytest

from diffurefill.config import DRAFT, REFILL
from diffurefill.demo.writing import (
    PYTHON_INFILL,
    held_out_statistics,
    sample_statistics,
    write_samples,
)
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.loading import LoadedModel, load
from tests.tiny import tiny_config, write_corpus


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("writing")
    config = tiny_config(write_corpus(folder, num_documents=1200))
    config = replace(config, data=replace(config.data, row_length=160, num_slots=1))
    train_alone(folder / "t", config, 2, lambda line: None)
    return load(str(folder / "t"))


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


def test_samples_repeat_with_the_seed(model: LoadedModel) -> None:
    first, again = (write_samples(model, is_python=True, seed=7) for _ in range(2))
    assert [s.text for s in first] == [s.text for s in again]


def test_text_statistics_are_shares_and_an_entropy(model: LoadedModel) -> None:
    for found in (sample_statistics(model, (DRAFT, REFILL)), held_out_statistics(model)):
        assert 0.0 <= found["doubled_share"] <= 1.0
        assert 0.0 < found["distinct_2"] <= 1.0
        assert 0.0 < found["own_ce"] < 20.0
