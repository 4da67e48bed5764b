"""Every outer step equals a plain reference, and moves the global towards the workers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import ModelConfig, UserError
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.outer import OUTER_STEPS, num_matrices, orthogonal_direction
from diffurefill.model.denoiser import Denoiser
from diffurefill.optim.adamw import FUSED_PIECES, is_block_matrix
from diffurefill.runtime import philox
from diffurefill.store.base import sha256_file
from diffurefill.train.checkpoint import load_weights
from tests.fleet.weights import (
    PROPERTY,
    Weights,
    bits,
    hexadecimal,
    payloads,
    random_weights,
    save,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "outer.json"
SHAPES = {"embedding.weight": (9, 4), "blocks.0.out.weight": (6, 4), "norm.weight": (4,)}
LR, MOMENTUM = 0.8, 0.5
AVERAGERS = {
    "replacement": FileAverager(),
    "sgd": FileAverager("sgd", LR),
    "nesterov": FileAverager("nesterov", LR, MOMENTUM),
    "orthogonal": FileAverager("orthogonal", LR),
}


def made(*key: int | str, scale: float = 2.0**-9) -> Weights:
    draw = philox("outer", *key)
    return {
        name: torch.from_numpy((scale * draw.integers(-1000, 1000, shape)).astype("float32"))
        for name, shape in SHAPES.items()
    }


def merged(
    folder: Path,
    averager: FileAverager,
    base: Weights,
    deltas: list[tuple[Weights, float]],
    momentum: Path | None = None,
) -> Weights:
    following = folder / "momentum" if averager.needs_momentum else None
    averager.merge(
        save(folder / "base", base),
        payloads(folder, deltas),
        folder / "next",
        momentum=momentum,
        momentum_dest=following,
    )
    return load_weights(folder / "next")


# --- a plain reference: whole tensors in numpy, one fp32 operation at a time ---


def reference(
    kind: str,
    base: dict[str, np.ndarray],
    deltas: list[tuple[dict[str, np.ndarray], float]],
    momentum: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """theta' by the formulas of spec 3.5, in terms of D = theta - mean; `momentum` is moved on."""
    total_weight = sum(weight for _, weight in deltas)
    moved = {}
    for name, theta in base.items():
        products = [np.float32(w / total_weight) * delta[name] for delta, w in deltas]
        mean = products[0]
        for product in products[1:]:
            mean = mean + product
        gradient, lr, mu = -mean, np.float32(LR), np.float32(MOMENTUM)
        if kind == "replacement":
            lr = np.float32(1)
        elif kind == "nesterov":
            momentum[name] = mu * momentum[name] + gradient
            gradient = gradient + mu * momentum[name]
        elif kind == "orthogonal" and name.startswith("blocks."):
            u, s, vh = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
            gradient = np.float32(u @ vh * math.sqrt(np.sum(s**2) / len(s)))
        moved[name] = theta - lr * gradient
    return moved


@pytest.mark.parametrize("kind", OUTER_STEPS)
def test_three_rounds_match_the_plain_reference_and_the_golden_file(
    tmp_path: Path, kind: str
) -> None:
    """`REWRITE_GOLDEN=1 pytest` after a change that is meant to change results."""
    averager, base = AVERAGERS[kind], save(tmp_path / "global0", made("base"))
    expected = {name: t.numpy() for name, t in made("base").items()}
    slow = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    momentum, rounds = None, []
    for i in range(1, 4):
        deltas = [(made(i, w, scale=2.0**-13), 1000.0 * (w + i)) for w in range(2)]
        following = tmp_path / f"momentum{i}" if averager.needs_momentum else None
        dest = tmp_path / f"global{i}"
        averager.merge(
            base, payloads(tmp_path, deltas), dest, momentum=momentum, momentum_dest=following
        )
        base, momentum = dest, following
        plain = [({n: t.numpy() for n, t in delta.items()}, w) for delta, w in deltas]
        expected = reference(kind, expected, plain, slow)
        rounds.append(hexadecimal(base))
        for name, tensor in load_weights(base).items():
            if kind == "orthogonal":  # a decomposition does not repeat its bits everywhere
                assert np.allclose(tensor.numpy(), expected[name], rtol=0, atol=1e-6)
                expected[name] = tensor.numpy()
            else:
                assert tensor.numpy().tobytes() == expected[name].tobytes()
    compare_with_golden(kind, rounds)


def compare_with_golden(kind: str, rounds: list[dict[str, list[str]]]) -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("REWRITE_GOLDEN"):
        golden[kind] = rounds
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    if kind != "orthogonal":
        assert rounds == golden[kind]
        return
    for found, kept in zip(rounds, golden[kind], strict=True):
        for name in SHAPES:
            values = [float.fromhex(text) for text in found[name]]
            assert values == pytest.approx([float.fromhex(t) for t in kept[name]], abs=1e-5)


# --- what holds whatever the numbers ---


@pytest.mark.parametrize("kind", OUTER_STEPS)
def test_one_worker_draws_the_global_towards_its_weights(tmp_path: Path, kind: str) -> None:
    base, delta = made("base"), made("delta")
    after = merged(tmp_path, AVERAGERS[kind], base, [(delta, 1.0)])
    for name in base:
        assert float(((after[name] - base[name]) * delta[name]).sum()) > 0, name


def test_sgd_without_a_rate_is_replacement_to_the_bit(tmp_path: Path) -> None:
    deltas = [(random_weights("d", i), i + 1.0) for i in range(3)]
    base = random_weights("base")
    plain = merged(tmp_path, FileAverager(), base, deltas)
    assert bits(merged(tmp_path, FileAverager("sgd"), base, deltas)) == bits(plain)
    assert bits(merged(tmp_path, FileAverager("nesterov"), base, deltas)) == bits(plain)


def test_half_a_rate_goes_half_the_way(tmp_path: Path) -> None:
    base, delta = made("base"), made("delta")
    after = merged(tmp_path, FileAverager("sgd", 0.5), base, [(delta, 1.0)])
    assert bits(after) == bits({name: base[name] + 0.5 * delta[name] for name in base})


def test_nesterov_with_a_constant_delta_settles_at_its_gain(tmp_path: Path) -> None:
    """lr / (1 - momentum) times the delta; the first step is lr (1 + momentum) of it."""
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    delta, averager = made("delta"), AVERAGERS["nesterov"]
    momentum, gains = None, []
    for _ in range(25):
        after = merged(tmp_path, averager, zero, [(delta, 1.0)], momentum)
        momentum = tmp_path / "momentum"
        gains.append(float(after["norm.weight"][0] / delta["norm.weight"][0]))
        assert averager.outer_gain == pytest.approx(gains[-1], rel=1e-5)
    assert gains[0] == pytest.approx(LR * (1 + MOMENTUM))
    assert gains[-1] == pytest.approx(LR / (1 - MOMENTUM), rel=1e-6)
    assert gains == sorted(gains)


def test_the_gain_is_of_the_whole_step_and_for_momentum_only(tmp_path: Path) -> None:
    base, deltas = made("base"), [(made(i), i + 1.0) for i in range(2)]
    averager = FileAverager("nesterov", LR, MOMENTUM, chunk_elements=5)
    merged(tmp_path, averager, base, [(made("before"), 1.0)])
    (tmp_path / "momentum").rename(tmp_path / "kept")
    after = merged(tmp_path, averager, base, deltas, tmp_path / "kept")
    plain = merged(tmp_path, FileAverager(), base, deltas)

    def length(new: Weights) -> float:
        return math.sqrt(sum(float(((new[n] - base[n]) ** 2).sum()) for n in base))

    assert averager.outer_gain == pytest.approx(length(after) / length(plain), rel=1e-3)
    still = [({name: torch.zeros_like(t) for name, t in base.items()}, 1.0)]
    merged(tmp_path, averager, base, still)
    assert averager.outer_gain == 0.0
    for other in ("replacement", "sgd", "orthogonal"):
        merged(tmp_path, AVERAGERS[other], base, deltas)
        assert AVERAGERS[other].outer_gain is None


def test_the_momentum_points_against_the_workers(tmp_path: Path) -> None:
    """It is of D, as in the formula: a reader of the file needs no other convention."""
    delta = made("delta")
    merged(tmp_path, AVERAGERS["nesterov"], made("base"), [(delta, 1.0)])
    assert bits(load_weights(tmp_path / "momentum")) == bits({n: -t for n, t in delta.items()})


def test_no_momentum_is_momentum_zero(tmp_path: Path) -> None:
    base, deltas = made("base"), [(made("delta"), 1.0)]
    first = merged(tmp_path, AVERAGERS["nesterov"], base, deltas)
    zero = save(tmp_path / "zero", {n: torch.zeros_like(t) for n, t in base.items()})
    again = merged(tmp_path, AVERAGERS["nesterov"], base, deltas, zero)
    assert bits(first) == bits(again)


def test_momentum_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    other = save(tmp_path / "other", {**made("m"), "norm.weight": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"other: tensor norm.weight is"):
        merged(tmp_path, AVERAGERS["nesterov"], made("base"), [(made("d"), 1.0)], other)
    assert not (tmp_path / "next").exists()
    assert not (tmp_path / "momentum").exists()


def test_momentum_goes_with_nesterov_and_only_with_it(tmp_path: Path) -> None:
    base, some = save(tmp_path / "base", made("base")), payloads(tmp_path, [(made("d"), 1.0)])
    with pytest.raises(ValueError, match="momentum_dest"):
        AVERAGERS["nesterov"].merge(base, some, tmp_path / "next")
    with pytest.raises(ValueError, match="momentum_dest"):
        FileAverager().merge(base, some, tmp_path / "next", momentum_dest=tmp_path / "momentum")


# --- orthogonal ---

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@PROPERTY
@given(shape=SIZES, key=st.integers(0, 1000), scale=st.sampled_from([1e-12, 1e-3, 1e9]))
def test_the_direction_has_equal_singular_values_and_the_same_norm(
    shape: tuple[int, int], key: int, scale: float
) -> None:
    matrix = torch.from_numpy(scale * philox(key).standard_normal(shape)).float()
    direction = orthogonal_direction(matrix)
    values = torch.linalg.svdvals(direction)
    norm = float(matrix.norm())
    assert torch.allclose(values, torch.tensor(norm / math.sqrt(min(shape))), rtol=1e-4)
    assert float(direction.norm()) == pytest.approx(norm, rel=1e-4)
    assert float((direction * matrix).sum()) > 0


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_directions_that_nobody_moved_in_stay_still(rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    left, right = torch.randn(8, rank, generator=draw), torch.randn(rank, 6, generator=draw)
    values = torch.linalg.svdvals(orthogonal_direction(left @ right))
    expected = (left @ right).norm() / math.sqrt(rank)
    assert torch.allclose(values[:rank], expected, rtol=1e-4)
    assert torch.all(values[rank:] < 1e-5 * expected)


def test_a_multiple_of_an_orthogonal_matrix_stays_as_it_is() -> None:
    q = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).Q
    assert torch.allclose(orthogonal_direction(0.003 * q), 0.003 * q, rtol=0, atol=1e-8)
    assert torch.equal(orthogonal_direction(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_fused_matrices_are_cut_and_all_but_block_matrices_averaged(tmp_path: Path) -> None:
    shapes = {
        "embedding.weight": (16, 4),
        "blocks.0.qkv.weight": (12, 4),
        "blocks.0.gate_up.weight": (10, 4),
        "blocks.0.down.weight": (4, 5),
        "blocks.0.norm.weight": (4,),
    }
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    delta = random_weights("fused", shapes=shapes)
    after = merged(tmp_path, FileAverager("orthogonal", chunk_elements=7), base, [(delta, 1.0)])
    for name in ("embedding.weight", "blocks.0.norm.weight"):
        assert torch.equal(after[name], delta[name])
    for name, pieces in {"qkv": 3, "gate_up": 2, "down": 1}.items():
        name = f"blocks.0.{name}.weight"
        for found, true in zip(after[name].chunk(pieces), delta[name].chunk(pieces), strict=True):
            assert torch.allclose(found, orthogonal_direction(true), rtol=1e-5)


def test_the_matrices_are_those_that_muon_takes() -> None:
    model = Denoiser(ModelConfig(vocab_size=32, width=16, layers=2, heads=2, ffn_width=24))
    for name, parameter in model.named_parameters():
        expected = FUSED_PIECES.get(".".join(name.split(".")[-2:]), 1)
        taken = is_block_matrix(name, parameter)
        assert num_matrices(name, tuple(parameter.shape)) == (expected if taken else 0), name


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("adam",), "no outer step 'adam'; there are replacement, sgd, nesterov, orthogonal"),
        (("sgd", 0.0), "outer_lr must be a positive number"),
        (("sgd", math.nan), "outer_lr must be a positive number"),
        (("nesterov", 0.8, 1.0), "outer_momentum must lie in"),
        (("replacement", 0.8), "choose sgd"),
        (("sgd", 0.8, 0.5), "choose nesterov"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: tuple, said: str) -> None:
    with pytest.raises(UserError, match=said):
        FileAverager(*settings)


def test_the_chunk_changes_no_bit(tmp_path: Path) -> None:
    for kind in ("sgd", "nesterov"):
        digests = set()
        for chunk_elements in (1, 5, 1000):
            averager = FileAverager(
                kind, LR, MOMENTUM if kind == "nesterov" else 0.0, chunk_elements=chunk_elements
            )
            merged(tmp_path, averager, made("base"), [(made("a"), 1.0), (made("b"), 2.0)])
            digests.add(sha256_file(tmp_path / "next").sha256)
        assert len(digests) == 1
