"""The streamed merge equals a plain reference bit for bit and holds no model in memory."""

from __future__ import annotations

import json
import math
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
from diffurefill.fleet.folds import average_last
from diffurefill.fleet.records import Fold, Inspection, Payload
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


# --- side averages ---


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


# --- the merger's view of contributions ---


@pytest.mark.parametrize("codec", CODECS)
def test_the_merger_is_told_what_is_wrong_with_a_payload(tmp_path: Path, codec: str) -> None:
    base, averager = save(tmp_path / "base", random_weights("base")), FileAverager()
    good = encoded(tmp_path, "good", random_weights("good"), codec)
    flat = torch.cat([t.flatten().double() for t in decoded(good, codec, base).values()])
    found = averager.inspect(good, codec, base)
    assert found == Inspection(None, pytest.approx(float(flat.norm()), rel=1e-12))
    nan = random_weights("nan")
    nan["embedding"][0, 0] = float("nan")
    bad = encoded(tmp_path, "nan", nan, codec)
    assert averager.inspect(bad, codec, base) == Inspection("nonfinite", math.inf)
    other = encoded(tmp_path, "other", {"w": torch.zeros(1)}, codec)
    assert averager.inspect(other, codec, base) == Inspection("schema", math.inf)
    assert averager.inspect(good, "zip", base) == Inspection("codec", math.inf)
    good.write_bytes(good.read_bytes()[:-1])
    assert averager.inspect(good, codec, base) == Inspection("schema", math.inf)


def test_a_damaged_base_is_not_blamed_on_the_payload(tmp_path: Path) -> None:
    good = save(tmp_path / "good", random_weights("good"))
    (tmp_path / "base").write_bytes(b"torn")
    with pytest.raises(ValueError, match="base is not a whole safetensors file"):
        FileAverager().inspect(good, "fp32-delta", tmp_path / "base")


def plain_cosines(deltas: list[Weights]) -> list[float]:
    flat = torch.stack([torch.cat([t.flatten().double() for t in d.values()]) for d in deltas])
    others = flat.sum(0) - flat
    return torch.nn.functional.cosine_similarity(flat, others, dim=1).tolist()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_cosines_are_with_the_sum_of_the_others(tmp_path: Path, codec: str, n: int) -> None:
    paths = [encoded(tmp_path, f"d{i}", random_weights(i), codec) for i in range(n)]
    expected = plain_cosines([decoded(path, codec, tmp_path / "zero") for path in paths])
    found = FileAverager(chunk_elements=20).cosines([Payload(p, codec, 1.0) for p in paths])
    assert found == pytest.approx(expected, abs=1e-12)


def test_cosines_of_known_directions(tmp_path: Path) -> None:
    def cosines(*vectors: list[float]) -> list[float]:
        deltas = [({"w": torch.tensor(v)}, 1.0) for v in vectors]
        return FileAverager().cosines(payloads(tmp_path, deltas))

    assert cosines() == []
    assert cosines([3.0, 4.0]) == [1.0]
    assert cosines([1.0, 0.0], [-2.0, 0.0]) == [-1.0, -1.0]
    assert cosines([1.0, 0.0], [0.0, 5.0]) == [0.0, 0.0]
    assert cosines([0.0, 0.0], [0.0, 5.0]) == [0.0, 0.0]
    assert cosines([1.0, 0.0], [1.0, 1.0], [-1.0, -1.0])[0] == 0.0


def test_deltas_of_different_models_have_no_cosine(tmp_path: Path) -> None:
    files = payloads(tmp_path, [({"w": torch.ones(2)}, 1.0), ({"w": torch.ones(3)}, 1.0)])
    with pytest.raises(ValueError, match="delta1: tensor w"):
        FileAverager().cosines(files)


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
