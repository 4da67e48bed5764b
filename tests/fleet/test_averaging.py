"""The streamed averages equal a plain reference bit for bit and hold no model in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffurefill.fleet.averaging import FileAverager, exponential_average, mean_of_deltas
from diffurefill.fleet.codec import encode_delta
from diffurefill.runtime import philox
from diffurefill.store.base import sha256_file
from diffurefill.train.checkpoint import load_weights, save_weights

COMMON = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "averaging.json"
SHAPES = {"embedding": (11, 7), "gain": (7,), "scale": (), "none": (0, 3)}

Weights = dict[str, Tensor]


def random_weights(*key: int | str) -> Weights:
    """Values of very different size, so that any other order of the sum shows."""
    draw = philox("averaging", *key)
    return {
        name: torch.from_numpy(
            np.asarray(draw.standard_normal(shape) * 10.0 ** draw.integers(-4, 4, shape), "float32")
        )
        for name, shape in SHAPES.items()
    }


def save(path: Path, weights: Weights) -> Path:
    save_weights(path, weights)
    return path


def bits(weights: Weights) -> dict[str, bytes]:
    return {name: t.contiguous().numpy().tobytes() for name, t in sorted(weights.items())}


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


def plain_ema(previous: Weights, new: Weights, decay: float) -> Weights:
    return {
        name: torch.from_numpy(
            np.asarray(
                np.float32(decay) * previous[name].numpy()
                + np.float32(1.0 - decay) * new[name].numpy()
            )
        )
        for name in new
    }


# --- mean ---


@COMMON
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
    files = [(save(tmp_path / f"d{i}", d), n) for i, (d, n) in enumerate(deltas)]
    mean_of_deltas(base_path, files, tmp_path / "mean", chunk_elements=chunk_elements)
    assert bits(load_weights(tmp_path / "mean")) == bits(plain_mean(base, deltas))


def test_equal_weights_give_torchs_stacked_mean(tmp_path: Path) -> None:
    """An independent reference: for a power of two the shares are exact."""
    deltas = [random_weights(i) for i in range(4)]
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    files = [(save(tmp_path / f"d{i}", d), 19_660_800.0) for i, d in enumerate(deltas)]
    mean_of_deltas(save(tmp_path / "zero", zero), files, tmp_path / "mean")
    expected = {name: torch.stack([d[name] for d in deltas]).mean(0) for name in SHAPES}
    for name, tensor in load_weights(tmp_path / "mean").items():
        assert torch.equal(tensor, expected[name]), name


def test_a_lone_contribution_gives_base_plus_delta_exactly(tmp_path: Path) -> None:
    base, delta = random_weights("base"), random_weights("delta")
    base["gain"][0] = delta["gain"][0] = -0.0
    mean_of_deltas(
        save(tmp_path / "base", base), [(save(tmp_path / "d", delta), 123.0)], tmp_path / "mean"
    )
    expected = {name: base[name] + delta[name] for name in base}
    assert bits(load_weights(tmp_path / "mean")) == bits(expected)


def test_the_order_of_the_sum_is_the_given_one(tmp_path: Path) -> None:
    """2^24 + 1 is lost in fp32, so the two orders differ."""
    values = [2.0**25, 2.0, 2.0, -(2.0**25)]
    files = [
        (save(tmp_path / f"d{i}", {"w": torch.tensor([v])}), 1.0) for i, v in enumerate(values)
    ]
    base = save(tmp_path / "base", {"w": torch.zeros(1)})

    def mean(order: list[int]) -> float:
        mean_of_deltas(base, [files[i] for i in order], tmp_path / "mean")
        return float(load_weights(tmp_path / "mean")["w"])

    assert mean([0, 1, 2, 3]) == 0.0
    assert mean([1, 2, 0, 3]) == 1.0


def test_the_same_inputs_give_the_same_file(tmp_path: Path) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    files = [(save(tmp_path / f"d{i}", random_weights(i)), i + 1.0) for i in range(3)]
    mean_of_deltas(base, files, tmp_path / "one")
    mean_of_deltas(base, files, tmp_path / "two", chunk_elements=5)
    assert sha256_file(tmp_path / "one") == sha256_file(tmp_path / "two")


def test_encoding_and_merging_one_worker_gives_its_weights_back(tmp_path: Path) -> None:
    """Exact when the step is small: the difference of near fp32 numbers is one as well."""
    base = random_weights("base")
    new = {name: t * (1.0 + 2.0**-10) for name, t in base.items()}
    base_path = save(tmp_path / "base", base)
    encode_delta(base_path, new, tmp_path / "delta")
    mean_of_deltas(base_path, [(tmp_path / "delta", 7.0)], tmp_path / "mean")
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
    good = save(tmp_path / "good", random_weights("good"))
    bad = save(tmp_path / "bad", {**random_weights("bad"), **other})
    with pytest.raises(ValueError, match=f"bad: tensor {named} is"):
        mean_of_deltas(base, [(good, 1.0), (bad, 1.0)], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_count_is_refused(tmp_path: Path, weight: float) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    with pytest.raises(ValueError, match="positive"):
        mean_of_deltas(base, [(base, 1.0), (base, weight)], tmp_path / "mean")


def test_a_mean_of_nothing_is_refused(tmp_path: Path) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    with pytest.raises(ValueError, match="at least one"):
        mean_of_deltas(base, [], tmp_path / "mean")


# --- EMA ---


@COMMON
@given(decay=st.floats(0.0, 0.9999), chunk_elements=st.integers(1, 100), key=st.integers(0, 1000))
def test_the_ema_is_the_plain_one_to_the_bit_whatever_the_chunk(
    tmp_path: Path, decay: float, chunk_elements: int, key: int
) -> None:
    previous, new = random_weights("previous", key), random_weights("new", key)
    paths = save(tmp_path / "previous", previous), save(tmp_path / "new", new)
    exponential_average(*paths, decay, tmp_path / "ema", chunk_elements=chunk_elements)
    assert bits(load_weights(tmp_path / "ema")) == bits(plain_ema(previous, new, decay))


def test_the_first_ema_is_the_first_global(tmp_path: Path) -> None:
    new = save(tmp_path / "new", random_weights("new"))
    exponential_average(None, new, 0.9, tmp_path / "ema", chunk_elements=3)
    assert sha256_file(tmp_path / "ema") == sha256_file(new)


def test_an_ema_may_replace_its_own_file(tmp_path: Path) -> None:
    ema = save(tmp_path / "ema", random_weights("previous"))
    new = save(tmp_path / "new", random_weights("new"))
    expected = plain_ema(random_weights("previous"), random_weights("new"), 0.9)
    exponential_average(ema, new, 0.9, ema)
    assert bits(load_weights(ema)) == bits(expected)


def test_an_ema_over_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    previous = save(tmp_path / "previous", {**random_weights("p"), "gain": torch.zeros(8)})
    new = save(tmp_path / "new", random_weights("new"))
    with pytest.raises(ValueError, match="previous: tensor gain is"):
        exponential_average(previous, new, 0.9, tmp_path / "ema")


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_outside_its_range_is_refused(tmp_path: Path, decay: float) -> None:
    new = save(tmp_path / "new", random_weights("new"))
    with pytest.raises(ValueError, match="keeps"):
        exponential_average(None, new, decay, tmp_path / "ema")


# --- the merger's view ---


def test_the_merger_is_told_what_is_wrong_with_a_payload(tmp_path: Path) -> None:
    base = save(tmp_path / "base", random_weights("base"))
    nan = random_weights("nan")
    nan["scale"].fill_(float("nan"))
    averager = FileAverager()
    good = save(tmp_path / "good", random_weights("good"))
    assert averager.fault(good, base) is None
    assert averager.fault(save(tmp_path / "nan", nan), base) == "nonfinite"
    assert averager.fault(save(tmp_path / "other", {"w": torch.zeros(1)}), base) == "schema"


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
        deltas = [(save(tmp_path / f"d{w}", made(2.0**-13)), 1000.0 * (w + i)) for w in range(2)]
        mean_of_deltas(base, deltas, tmp_path / f"global{i}")
        base = tmp_path / f"global{i}"
        exponential_average(ema, base, 0.9, tmp_path / f"ema{i}")
        ema = tmp_path / f"ema{i}"
        rounds.append({kind: hexadecimal(path) for kind, path in (("global", base), ("ema", ema))})
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(rounds, indent=1) + "\n")
    assert rounds == json.loads(GOLDEN.read_text())


def hexadecimal(path: Path) -> dict[str, list[str]]:
    return {
        name: [value.hex() for value in t.flatten().tolist()]
        for name, t in sorted(load_weights(path).items())
    }


# --- memory ---

CHILD = """
import resource, sys
from pathlib import Path
import torch
from diffurefill.fleet.averaging import exponential_average, mean_of_deltas
from diffurefill.fleet.codec import inspect_delta
from diffurefill.train.checkpoint import schema

def peak_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

torch.set_num_threads(1)
folder, num_deltas = Path(sys.argv[1]), int(sys.argv[2])
small, large = folder / "small", folder / "large"
deltas = [(large, 1.0)] * num_deltas
mean_of_deltas(small, [(small, 1.0)], folder / "out")  # what the first use of each costs
exponential_average(small, small, 0.9, folder / "out")
inspect_delta(small, schema(small))
before = peak_mb()
mean_of_deltas(large, deltas, folder / "out")
exponential_average(large, large, 0.9, folder / "out")
inspect_delta(large, schema(large))
print(peak_mb() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_grows_neither_with_the_model_nor_with_the_contributions(tmp_path: Path) -> None:
    """A child process merges 8 deltas of 80 MB; its peak may grow by a few chunks of 4 MB."""
    save_weights(tmp_path / "small", {"w": torch.zeros(1 << 20)})
    save_weights(tmp_path / "large", {"v": torch.zeros(9 << 20), "w": torch.zeros(11 << 20)})
    command = [sys.executable, "-c", CHILD, str(tmp_path), "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 24.0
