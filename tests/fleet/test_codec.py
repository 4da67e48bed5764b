"""A contribution is the fp32 difference, and what is wrong with one is seen before a merge."""

import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from diffurefill.fleet.codec import DeltaFacts, encode_delta, inspect_delta
from diffurefill.runtime import philox
from diffurefill.store.base import sha256_file
from diffurefill.train.checkpoint import load_weights, save_weights, schema

SHAPES = {"embedding": (7, 5), "gain": (5,), "scale": (), "none": (0, 3)}


def random_weights(*key: int | str) -> dict[str, Tensor]:
    draw = philox("codec", *key)
    return {
        name: torch.from_numpy(np.asarray(draw.standard_normal(shape), dtype="float32"))
        for name, shape in SHAPES.items()
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    save_weights(path, random_weights("base"))
    return path


@pytest.mark.parametrize("chunk_elements", [1, 3, 1000])
def test_a_delta_is_new_minus_base_in_fp32_whatever_the_chunk(
    tmp_path: Path, base: Path, chunk_elements: int
) -> None:
    new = random_weights("new")
    encode_delta(base, new, tmp_path / "delta", chunk_elements=chunk_elements)
    for name, delta in load_weights(tmp_path / "delta").items():
        expected = new[name].numpy() - random_weights("base")[name].numpy()
        assert delta.numpy().tobytes() == expected.tobytes()


def test_parameters_that_need_gradients_or_are_not_contiguous_are_encoded_as_they_look(
    tmp_path: Path, base: Path
) -> None:
    plain = random_weights("new")
    turned = {
        name: (t.T.contiguous().T if t.ndim == 2 else t.clone()).requires_grad_()
        for name, t in plain.items()
    }
    encode_delta(base, plain, tmp_path / "plain")
    encode_delta(base, turned, tmp_path / "turned")
    assert sha256_file(tmp_path / "plain") == sha256_file(tmp_path / "turned")


def test_encoding_leaves_the_weights_as_they_were(tmp_path: Path, base: Path) -> None:
    new = random_weights("new")
    encode_delta(base, new, tmp_path / "delta")
    assert all(torch.equal(new[name], t) for name, t in random_weights("new").items())


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_weights_that_do_not_fit_the_base_are_refused_by_name(
    tmp_path: Path, base: Path, change: str
) -> None:
    new = random_weights("new")
    if change == "missing":
        del new["gain"]
    elif change == "extra":
        new["gain2"] = torch.zeros(1)
    elif change == "shape":
        new["gain"] = torch.zeros(6)
    else:
        new["gain"] = new["gain"].bfloat16()
    with pytest.raises(ValueError, match="tensor gain"):
        encode_delta(base, new, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_an_honest_delta_passes_with_its_norm(tmp_path: Path, base: Path) -> None:
    encode_delta(base, random_weights("new"), tmp_path / "delta")
    facts = inspect_delta(tmp_path / "delta", schema(base), chunk_elements=3)
    flat = np.concatenate([t.numpy().ravel() for t in load_weights(tmp_path / "delta").values()])
    assert facts.finite
    assert facts.schema_matches
    assert facts.norm == pytest.approx(np.linalg.norm(flat.astype(np.float64)), rel=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["embedding", "scale"])
def test_one_value_that_is_not_finite_is_found(
    tmp_path: Path, base: Path, value: float, name: str
) -> None:
    delta = random_weights("delta")
    delta[name].view(-1)[-1] = value
    save_weights(tmp_path / "delta", delta)
    facts = inspect_delta(tmp_path / "delta", schema(base))
    assert facts == DeltaFacts(finite=False, norm=math.inf, schema_matches=True)


def test_the_largest_finite_values_are_no_false_alarm(tmp_path: Path, base: Path) -> None:
    huge = torch.finfo(torch.float32).max
    delta = {name: torch.full(shape, huge) for name, shape in SHAPES.items()}
    save_weights(tmp_path / "delta", delta)
    facts = inspect_delta(tmp_path / "delta", schema(base))
    assert facts.finite
    assert facts.norm == pytest.approx(huge * math.sqrt(7 * 5 + 5 + 1), rel=1e-12)


MISMATCH = DeltaFacts(finite=False, norm=math.inf, schema_matches=False)


def test_another_schema_is_seen(tmp_path: Path, base: Path) -> None:
    for name, other in {
        "renamed": {**random_weights("d"), "extra": torch.zeros(1)},
        "reshaped": {**random_weights("d"), "gain": torch.zeros(5, 1)},
    }.items():
        save_weights(tmp_path / name, other)
        assert inspect_delta(tmp_path / name, schema(base)) == MISMATCH
    halves = {name: t.half() for name, t in random_weights("d").items()}
    safetensors.torch.save_file(halves, tmp_path / "halves")
    assert inspect_delta(tmp_path / "halves", schema(base)) == MISMATCH


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_damaged_file_matches_no_schema_and_raises_nothing(
    tmp_path: Path, base: Path, content: bytes | None
) -> None:
    path = tmp_path / "delta"
    path.write_bytes(base.read_bytes()[:-1] if content is None else content)
    assert inspect_delta(path, schema(base)) == MISMATCH
