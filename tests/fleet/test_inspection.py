"""What a merger is told of contributions before it takes them: what is wrong, and cosines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.codec import CODECS
from diffurefill.fleet.records import Inspection, Payload
from tests.fleet.weights import Weights, decoded, encoded, payloads, random_weights, save


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
