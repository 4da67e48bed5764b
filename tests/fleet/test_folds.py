"""EMA, SWA and the mean of the last globals equal plain references bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.folds import average_last
from diffurefill.fleet.records import Fold
from diffurefill.runtime import philox
from diffurefill.store.base import sha256_file
from diffurefill.train.checkpoint import load_weights
from tests.fleet.weights import PROPERTY, Weights, bits, payloads, random_weights, save


def plain_fold(previous: Weights, new: Weights, keep: float) -> Weights:
    return {
        name: torch.from_numpy(
            np.asarray(
                np.float32(keep) * previous[name].numpy()
                + np.float32(1.0 - keep) * new[name].numpy()
            )
        )
        for name in new
    }


@PROPERTY
@given(keep=st.floats(0.0, 0.9999), chunk_elements=st.integers(1, 100), key=st.integers(0, 1000))
def test_a_fold_is_the_plain_one_to_the_bit_whatever_the_chunk(
    tmp_path: Path, keep: float, chunk_elements: int, key: int
) -> None:
    previous, new = random_weights("previous", key), random_weights("new", key)
    fold = Fold(save(tmp_path / "previous", previous), keep, tmp_path / "ema")
    FileAverager(chunk_elements=chunk_elements).fold(save(tmp_path / "new", new), [fold])
    assert bits(load_weights(tmp_path / "ema")) == bits(plain_fold(previous, new, keep))


def test_an_average_starts_as_the_first_global(tmp_path: Path) -> None:
    new = save(tmp_path / "new", random_weights("new"))
    FileAverager().fold(new, [Fold(None, 0.9, tmp_path / "ema")])
    assert sha256_file(tmp_path / "ema") == sha256_file(new)


def test_an_average_may_replace_its_own_file(tmp_path: Path) -> None:
    ema = save(tmp_path / "ema", random_weights("previous"))
    new = save(tmp_path / "new", random_weights("new"))
    FileAverager().fold(new, [Fold(ema, 0.9, ema)])
    expected = plain_fold(random_weights("previous"), random_weights("new"), 0.9)
    assert bits(load_weights(ema)) == bits(expected)


@pytest.mark.parametrize("step", ["replacement", "sgd", "orthogonal"])
def test_folds_in_the_pass_of_the_merge_are_those_made_later(tmp_path: Path, step: str) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    files = payloads(tmp_path, [(random_weights(i), i + 1.0) for i in range(2)])
    averager = FileAverager(step, chunk_elements=5)
    earlier = save(tmp_path / "earlier", random_weights("earlier"))

    def folds(folder: Path) -> list[Fold]:
        folder.mkdir()
        return [
            Fold(earlier, 0.9, folder / "ema"),
            Fold(base, 2 / 3, folder / "swa"),
            Fold(None, 0.9, folder / "first"),
        ]

    same_pass, later = folds(tmp_path / "same"), folds(tmp_path / "later")
    averager.merge(base, files, tmp_path / "next", folds=same_pass)
    averager.fold(tmp_path / "next", later)
    for a, b in zip(same_pass, later, strict=True):
        assert sha256_file(a.dest) == sha256_file(b.dest)


def test_folding_over_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    previous = save(tmp_path / "previous", {**random_weights("p"), "gain": torch.zeros(8)})
    new = save(tmp_path / "new", random_weights("new"))
    with pytest.raises(ValueError, match="previous: tensor gain is"):
        FileAverager().fold(new, [Fold(previous, 0.9, tmp_path / "ema")])


@pytest.mark.parametrize("keep", [-0.1, 1.0, float("nan")])
def test_a_keep_outside_its_range_is_refused(tmp_path: Path, keep: float) -> None:
    new = save(tmp_path / "new", random_weights("new"))
    with pytest.raises(ValueError, match="keeps"):
        FileAverager().fold(new, [Fold(None, keep, tmp_path / "ema")])


def run_of_globals(folder: Path, n: int) -> list[Path]:
    """Globals that drift as those of a run do: near each other, and wandering."""
    draw = philox("globals")
    value = draw.standard_normal(1000)
    paths = []
    for i in range(n):
        value = value + 0.01 * draw.standard_normal(1000)
        paths.append(save(folder / f"global{i}", {"w": torch.from_numpy(value).float()}))
    return paths


def test_the_running_mean_is_the_batch_mean(tmp_path: Path) -> None:
    """SWA over 130 globals, each folded when it was published."""
    paths, swa = run_of_globals(tmp_path, 130), tmp_path / "swa"
    for n, path in enumerate(paths, start=1):
        FileAverager().fold(path, [Fold(swa if n > 1 else None, (n - 1) / n, swa)])
    batch = torch.stack([load_weights(path)["w"].double() for path in paths]).mean(0)
    assert torch.allclose(load_weights(swa)["w"].double(), batch, rtol=1e-6, atol=1e-6)


def test_averages_of_a_constant_sequence_are_the_constant(tmp_path: Path) -> None:
    constant = save(tmp_path / "constant", random_weights("constant"))
    ema, swa = tmp_path / "ema", tmp_path / "swa"
    for n in range(1, 40):
        previous = n > 1
        folds = [Fold(ema if previous else None, 0.9, ema)]
        folds.append(Fold(swa if previous else None, (n - 1) / n, swa))
        FileAverager().fold(constant, folds)
    for name, tensor in random_weights("constant").items():
        assert torch.allclose(load_weights(ema)[name], tensor, rtol=1e-6, atol=0)
        assert torch.allclose(load_weights(swa)[name], tensor, rtol=1e-6, atol=0)
    average_last([constant] * 3, tmp_path / "last")
    assert sha256_file(tmp_path / "last") == sha256_file(constant)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_average_of_the_last_globals_is_their_mean(tmp_path: Path, k: int) -> None:
    paths = run_of_globals(tmp_path, k)
    average_last(paths, tmp_path / "last", chunk_elements=7)
    values = np.stack([load_weights(path)["w"].numpy().astype(np.float64) for path in paths])
    expected = (np.add.reduce(values, axis=0) / k).astype(np.float32)
    assert load_weights(tmp_path / "last")["w"].numpy().tobytes() == expected.tobytes()


def test_an_average_of_no_or_of_different_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        average_last([], tmp_path / "last")
    one, other = save(tmp_path / "a", {"w": torch.zeros(2)}), save(tmp_path / "b", {})
    with pytest.raises(ValueError, match="b: tensor w is absent"):
        average_last([one, other], tmp_path / "last")
