"""Each format decodes as its page says, and is off by no more than its bound."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diffurefill.fleet.codec import CODECS, encode_delta
from diffurefill.train.checkpoint import load_weights
from tests.fleet.weights import PROPERTY, Weights, decoded, encoded, random_weights, save

TINY = float(np.finfo(np.float32).tiny)
ELEMENT = st.floats(-(2.0**120), 2.0**120, width=32)
MATRIX = st.tuples(st.integers(1, 4), st.integers(1, 70)).flatmap(
    lambda shape: st.lists(ELEMENT, min_size=math.prod(shape), max_size=math.prod(shape)).map(
        lambda values: torch.tensor(values).reshape(shape)
    )
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(tmp_path / "base", random_weights("base"))


def values_of(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    stored = load_weights(path)
    return stored[name].numpy(), stored[name + ":scale"].float().numpy()


def test_int8_is_a_cast_and_one_product_in_fp32(tmp_path: Path, base: Path) -> None:
    encode_delta(base, random_weights("new"), tmp_path / "delta", codec="int8-delta")
    values, scales = values_of(tmp_path / "delta", "embedding")
    assert values.dtype == np.int8
    assert scales.shape == (11,)
    expected = values.astype(np.float32) * scales[:, None]
    found = decoded(tmp_path / "delta", "int8-delta", base)["embedding"].numpy()
    assert found.tobytes() == expected.tobytes()


def test_int4_is_two_elements_a_byte_and_one_product_in_fp32(tmp_path: Path, base: Path) -> None:
    encode_delta(base, random_weights("new"), tmp_path / "delta", codec="int4-delta")
    packed, scales = values_of(tmp_path / "delta", "embedding")
    assert packed.shape == (3, 16)  # 77 elements in blocks of 32
    values = np.stack([packed & 15, packed >> 4], axis=2).reshape(3, 32).astype(np.float32) - 8
    expected = (values * scales[:, None]).flatten()
    assert not expected[77:].any()
    found = decoded(tmp_path / "delta", "int4-delta", base)["embedding"].numpy()
    assert found.tobytes() == expected[:77].tobytes()


@PROPERTY
@given(matrix=MATRIX)
def test_bf16_is_off_by_half_a_step_of_each_element(tmp_path: Path, matrix: Tensor) -> None:
    path = encoded(tmp_path, "delta", {"w": matrix}, "bf16-delta")
    error = (decoded(path, "bf16-delta", tmp_path / "zero")["w"].double() - matrix).abs()
    assert torch.all(error <= 2.0**-8 * matrix.double().abs() + 2.0**-134)


@PROPERTY
@given(matrix=MATRIX)
def test_int8_is_off_by_half_a_scale_of_its_row(tmp_path: Path, matrix: Tensor) -> None:
    path = encoded(tmp_path, "delta", {"w": matrix}, "int8-delta")
    found = decoded(path, "int8-delta", tmp_path / "zero")["w"].double()
    scales = matrix.double().abs().amax(1, keepdim=True) / 127
    # The quotient and the product are rounded to fp32; rows below its normal numbers become zero.
    assert torch.all((found - matrix).abs() <= 0.50002 * scales + 127 * TINY)
    assert torch.all(found[matrix == 0] == 0)


@PROPERTY
@given(matrix=MATRIX)
def test_int4_is_off_by_half_a_scale_of_its_block(tmp_path: Path, matrix: Tensor) -> None:
    path = encoded(tmp_path, "delta", {"w": matrix}, "int4-delta")
    found = decoded(path, "int4-delta", tmp_path / "zero")["w"].double().flatten()
    flat = matrix.double().flatten()
    for block, true in zip(found.split(32), flat.split(32), strict=True):
        scale = float(true.abs().max()) / 7
        assert torch.all((block - true).abs() <= (0.5 + 2.0**-8) * scale + 7 * TINY)


def trained_delta() -> Weights:
    """What 150 steps of AdamW do to a matrix under a steady gradient and ten times its noise."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 256))
    steady = torch.randn(64, 256, generator=draw) * torch.logspace(-3, 1, 64)[:, None]
    optimizer = torch.optim.AdamW([weight], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(150):
        weight.grad = steady * (1 + 10 * torch.randn(64, 256, generator=draw))
        optimizer.step()
    return {"blocks.0.out.weight": weight.detach()}


@pytest.mark.parametrize(
    ("codec", "low", "high"),
    [
        ("fp32-delta", 0.0, 0.0),
        ("bf16-delta", 0.001, 0.003),
        ("int8-delta", 0.003, 0.01),
        ("int4-delta", 0.06, 0.12),
    ],
)
def test_the_relative_error_of_a_trained_delta_is_as_stated(
    tmp_path: Path, codec: str, low: float, high: float
) -> None:
    delta = trained_delta()
    path = encoded(tmp_path, "delta", delta, codec)
    ((name, true),) = delta.items()
    error = decoded(path, codec, tmp_path / "zero")[name] - true
    assert low <= float(error.norm() / true.norm()) <= high


def test_the_sizes_are_as_stated(tmp_path: Path) -> None:
    delta = {"w": torch.zeros(512, 2048)}
    sizes = {
        codec: encoded(tmp_path, codec, delta, codec).stat().st_size / (512 * 2048)
        for codec in CODECS
    }
    expected = {"fp32-delta": 4, "bf16-delta": 2, "int8-delta": 1.002, "int4-delta": 0.5625}
    assert sizes == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_zeros_stay_zero_and_signs_survive(tmp_path: Path, codec: str) -> None:
    delta = {"w": torch.zeros(3, 40)}
    delta["w"][1, ::2] = -(2.0**-100)
    path = encoded(tmp_path, "delta", delta, codec)
    found = decoded(path, codec, tmp_path / "zero")["w"]
    assert torch.equal(found.sign(), delta["w"].sign())
    assert torch.allclose(found, delta["w"], rtol=1e-2, atol=0)


def test_no_scale_lies_where_machines_flush_numbers_to_zero(tmp_path: Path) -> None:
    delta = {"w": torch.tensor([[1e-38] * 32, [100 * TINY] * 32, [200 * TINY] * 32])}
    for codec, kept in {"int8-delta": [0, 0, 1], "int4-delta": [0, 1, 1]}.items():
        _, scales = values_of(encoded(tmp_path, "delta", delta, codec), "w")
        assert np.array_equal(scales >= TINY, kept)
        assert not scales[scales < TINY].any()
