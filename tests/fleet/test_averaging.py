"""The streamed merge equals a plain reference bit for bit and holds no model in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.codec import CODECS, encode_delta
from diffurefill.fleet.records import Fold, Payload
from diffurefill.runtime import philox
from diffurefill.store.base import sha256_file
from diffurefill.train.checkpoint import load_weights
from tests.fleet.weights import (
    PROPERTY,
    SHAPES,
    Weights,
    bits,
    decoded,
    encoded,
    hexadecimal,
    payloads,
    random_weights,
    save,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "averaging.json"


def merge(base: Path, contributions: list[Payload], dest: Path, chunk_elements: int = 100) -> Path:
    FileAverager(chunk_elements=chunk_elements).merge(base, contributions, dest)
    return dest


def plain_mean(base: Weights, deltas: list[tuple[Weights, float]]) -> Weights:
    """The documented order, on whole tensors, with numpy's fp32: nothing can be fused here."""
    total_weight = sum(weight for _, weight in deltas)
    result = {}
    for name, tensor in base.items():
        products = [np.float32(w / total_weight) * d[name].numpy() for d, w in deltas]
        total = products[0]
        for product in products[1:]:
            total = total + product
        result[name] = torch.from_numpy(np.asarray(tensor.numpy() + total))
    return result


# --- mean ---


@PROPERTY
@given(
    tokens=st.lists(st.integers(1, 10**9), min_size=1, max_size=5),
    chunk_elements=st.integers(1, 100),
    key=st.integers(0, 1000),
)
def test_the_mean_is_the_plain_one_to_the_bit_whatever_the_chunk(
    tmp_path: Path, tokens: list[int], chunk_elements: int, key: int
) -> None:
    base = random_weights("base", key)
    deltas = [(random_weights(key, i), float(n)) for i, n in enumerate(tokens)]
    base_path = save(tmp_path / "base", base)
    found = merge(base_path, payloads(tmp_path, deltas), tmp_path / "mean", chunk_elements)
    assert bits(load_weights(found)) == bits(plain_mean(base, deltas))


@pytest.mark.parametrize("codecs", [*([codec] * 3 for codec in CODECS), CODECS])
def test_the_mean_is_over_what_each_codec_decodes_to(tmp_path: Path, codecs: list[str]) -> None:
    base = random_weights("base")
    base_path, deltas, files = save(tmp_path / "base", base), [], []
    for i, codec in enumerate(codecs):
        path = encoded(tmp_path, f"d{i}", random_weights(i), codec)
        deltas.append((decoded(path, codec, base_path), i + 1.0))
        files.append(Payload(path, codec, i + 1.0))
    found = merge(base_path, files, tmp_path / "mean", 10)
    assert bits(load_weights(found)) == bits(plain_mean(base, deltas))


def test_equal_weights_give_torchs_stacked_mean(tmp_path: Path) -> None:
    """An independent reference: for a power of two the shares are exact."""
    deltas = [random_weights(i) for i in range(4)]
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    files = payloads(tmp_path, [(d, 19_660_800.0) for d in deltas])
    merge(save(tmp_path / "zero", zero), files, tmp_path / "mean")
    expected = {name: torch.stack([d[name] for d in deltas]).mean(0) for name in SHAPES}
    for name, tensor in load_weights(tmp_path / "mean").items():
        assert torch.equal(tensor, expected[name]), name


def test_a_lone_contribution_gives_base_plus_delta_exactly(tmp_path: Path) -> None:
    base, delta = random_weights("base"), random_weights("delta")
    base["gain"][0] = delta["gain"][0] = -0.0
    files = payloads(tmp_path, [(delta, 123.0)])
    merge(save(tmp_path / "base", base), files, tmp_path / "mean")
    expected = {name: base[name] + delta[name] for name in base}
    assert bits(load_weights(tmp_path / "mean")) == bits(expected)


def test_the_order_of_the_sum_is_the_given_one(tmp_path: Path) -> None:
    """2^24 + 1 is lost in fp32, so the two orders differ."""
    values = [2.0**25, 2.0, 2.0, -(2.0**25)]
    files = payloads(tmp_path, [({"w": torch.tensor([v])}, 1.0) for v in values])
    base = save(tmp_path / "base", {"w": torch.zeros(1)})

    def mean(order: list[int]) -> float:
        return float(load_weights(merge(base, [files[i] for i in order], tmp_path / "mean"))["w"])

    assert mean([0, 1, 2, 3]) == 0.0
    assert mean([1, 2, 0, 3]) == 1.0


def test_encoding_and_merging_one_worker_gives_its_weights_back(tmp_path: Path) -> None:
    """Exact when the step is small: the difference of near fp32 numbers is one as well."""
    base = random_weights("base")
    new = {name: t * (1.0 + 2.0**-10) for name, t in base.items()}
    base_path = save(tmp_path / "base", base)
    encode_delta(base_path, new, tmp_path / "delta")
    merge(base_path, [Payload(tmp_path / "delta", "fp32-delta", 7.0)], tmp_path / "mean")
    assert bits(load_weights(tmp_path / "mean")) == bits(new)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"embedding": torch.zeros(7, 11)}, "embedding"),
        ({"extra": torch.zeros(1)}, "extra"),
    ],
)
def test_a_delta_of_another_schema_is_refused_by_name(
    tmp_path: Path, other: Weights, named: str
) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    files = payloads(
        tmp_path, [(random_weights("good"), 1.0), ({**random_weights("bad"), **other}, 1.0)]
    )
    with pytest.raises(ValueError, match=f"delta1: tensor {named} is"):
        merge(base, files, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_count_is_refused(tmp_path: Path, weight: float) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    files = payloads(tmp_path, [(random_weights(0), 1.0), (random_weights(1), weight)])
    with pytest.raises(ValueError, match="positive"):
        merge(base, files, tmp_path / "mean")


def test_a_mean_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge(save(tmp_path / "base", random_weights("base")), [], tmp_path / "mean")


# --- the update that workers may fetch instead of the global ---


@pytest.mark.parametrize("step", ["replacement", "sgd", "nesterov", "orthogonal"])
def test_base_and_update_give_the_global_byte_for_byte(tmp_path: Path, step: str) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    files = payloads(tmp_path, [(random_weights(i), i + 1.0) for i in range(2)])
    FileAverager(step, chunk_elements=20).merge(
        base,
        files,
        tmp_path / "next",
        momentum_dest=tmp_path / "momentum" if step == "nesterov" else None,
        update_dest=tmp_path / "update",
        folds=[Fold(base, 0.9, tmp_path / "ema")],
    )
    FileAverager(chunk_elements=6).apply_update(base, tmp_path / "update", tmp_path / "applied")
    assert sha256_file(tmp_path / "applied") == sha256_file(tmp_path / "next")
    FileAverager().fold(tmp_path / "next", [Fold(base, 0.9, tmp_path / "later")])
    assert sha256_file(tmp_path / "ema") == sha256_file(tmp_path / "later")


@PROPERTY
@given(chunk_elements=st.integers(1, 100))
def test_the_update_is_the_step_rounded_to_int8_whatever_the_chunk(
    tmp_path: Path, chunk_elements: int
) -> None:
    base = random_weights("base")
    deltas = [(random_weights(i), i + 1.0) for i in range(2)]
    FileAverager(chunk_elements=chunk_elements).merge(
        save(tmp_path / "base", base),
        payloads(tmp_path, deltas),
        tmp_path / "next",
        update_dest=tmp_path / "update",
    )
    step = plain_mean({n: torch.full_like(t, -0.0) for n, t in base.items()}, deltas)
    expected = encoded(tmp_path, "expected", step, "int8-delta")
    assert sha256_file(tmp_path / "update") == sha256_file(expected)
    rounded = decoded(expected, "int8-delta", tmp_path / "base")
    assert bits(load_weights(tmp_path / "next")) == bits({n: base[n] + rounded[n] for n in base})


# --- golden file: `REWRITE_GOLDEN=1 pytest` after a change that is meant to change results ---


def test_three_rounds_of_mean_and_ema_match_the_golden_file(tmp_path: Path) -> None:
    """Hexadecimal fp32 values of the global and its EMA over three rounds of two workers."""
    shapes = {"a": (2, 3), "b": (2,)}
    draw = philox("golden averaging")

    def made(scale: float) -> Weights:
        return {
            name: torch.from_numpy((scale * draw.integers(-1000, 1000, s)).astype("float32"))
            for name, s in shapes.items()
        }

    base, ema = save(tmp_path / "global0", made(2.0**-9)), None
    rounds = []
    for i in range(1, 4):
        files = payloads(tmp_path, [(made(2.0**-13), 1000.0 * (w + i)) for w in range(2)])
        following = tmp_path / f"ema{i}"
        FileAverager().merge(
            base, files, tmp_path / f"global{i}", folds=[Fold(ema, 0.9, following)]
        )
        base, ema = tmp_path / f"global{i}", following
        rounds.append({kind: hexadecimal(path) for kind, path in (("global", base), ("ema", ema))})
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(rounds, indent=1) + "\n")
    assert rounds == json.loads(GOLDEN.read_text())


# --- memory ---

CHILD = """
import ctypes
import sys
from pathlib import Path
import torch
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.codec import encode_delta
from diffurefill.fleet.records import Fold, Payload
from diffurefill.train.checkpoint import load_weights

def peak_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

def work(model, codec, n):
    delta = Path(f"{model}.{codec}")
    averager, payloads = FileAverager("sgd", 0.8), [Payload(delta, codec, 1.0)] * n
    averager.inspect(delta, codec, model)
    averager.cosines(payloads)
    folds = [Fold(model, 0.9, folder / "ema"), Fold(model, 0.5, folder / "swa")]
    averager.merge(model, payloads, folder / "out", update_dest=folder / "update", folds=folds)
    averager.apply_update(model, folder / "update", folder / "out")

torch.set_num_threads(1)
# M_MMAP_THRESHOLD of malloc.h: what is freed goes back, so that the peak is what the code holds and
# not what the allocator has not found a use for.
ctypes.CDLL(None).mallopt(-3, 1 << 20)
folder, codec, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
work(folder / "small", codec, 2)  # what the first use of each costs
before = peak_mb()
work(folder / "large", codec, n)
print(peak_mb() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("codec", "n"), [("fp32-delta", 8), ("int8-delta", 2)])
def test_memory_grows_neither_with_the_model_nor_with_the_contributions(
    tmp_path: Path, codec: str, n: int
) -> None:
    """A child process merges deltas to 40 MB of weights; its peak may grow by a few chunks."""
    for name, rows in {"small": 256, "large": 10 * 1024}.items():
        weights = {"w": torch.ones(rows, 1024)}
        encode_delta(
            save(tmp_path / name, weights), weights, tmp_path / f"{name}.{codec}", codec=codec
        )
    command = [sys.executable, "-c", CHILD, str(tmp_path), codec, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 24.0
