"""What a worker sends decodes to its delta, and nothing else gets in."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.fleet.codec import CODECS, DeltaFile, delta_norm, encode_delta
from diffurefill.runtime import philox
from diffurefill.store.base import sha256_file
from diffurefill.train.checkpoint import load_weights, save_weights, schema
from tests.fleet.weights import (
    PROPERTY,
    Weights,
    bits,
    decoded,
    encoded,
    hexadecimal,
    random_weights,
    save,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "codec.json"
every_codec = pytest.mark.parametrize("codec", CODECS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(tmp_path / "base", random_weights("base"))


def plain_delta(new: Weights, base: Weights) -> dict[str, np.ndarray]:
    return {name: np.asarray(new[name].numpy() - base[name].numpy()) for name in new}


# --- encoding ---


@pytest.mark.parametrize("chunk_elements", [1, 3, 1000])
def test_an_fp32_delta_is_new_minus_base_whatever_the_chunk(
    tmp_path: Path, base: Path, chunk_elements: int
) -> None:
    new = random_weights("new")
    encode_delta(base, new, tmp_path / "delta", chunk_elements=chunk_elements)
    expected = plain_delta(new, random_weights("base"))
    for name, delta in load_weights(tmp_path / "delta").items():
        assert delta.numpy().tobytes() == expected[name].tobytes()


@every_codec
def test_the_file_does_not_depend_on_the_chunk_nor_on_how_a_parameter_lies(
    tmp_path: Path, base: Path, codec: str
) -> None:
    plain = random_weights("new")
    turned = {
        name: (t.T.contiguous().T if t.ndim == 2 else t.clone()).requires_grad_()
        for name, t in plain.items()
    }
    encode_delta(base, plain, tmp_path / "plain", codec=codec)
    encode_delta(base, turned, tmp_path / "turned", codec=codec, chunk_elements=5)
    assert sha256_file(tmp_path / "plain") == sha256_file(tmp_path / "turned")


@every_codec
def test_encoding_leaves_the_weights_as_they_were(tmp_path: Path, base: Path, codec: str) -> None:
    new = random_weights("new")
    encode_delta(base, new, tmp_path / "delta", codec=codec)
    assert bits(new) == bits(random_weights("new"))


@every_codec
def test_both_sides_compute_the_norm_of_what_is_decoded(
    tmp_path: Path, base: Path, codec: str
) -> None:
    norm = encode_delta(base, random_weights("new"), tmp_path / "delta", codec=codec)
    flat = torch.cat([t.flatten() for t in decoded(tmp_path / "delta", codec, base).values()])
    assert norm == pytest.approx(np.linalg.norm(flat.numpy().astype(np.float64)), rel=1e-13)
    seen = delta_norm(tmp_path / "delta", codec, schema(base), chunk_elements=3)
    assert seen == pytest.approx(norm, rel=1e-13)


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


def test_what_a_codec_cannot_hold_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ValueError, match="'int3-delta' is not known here; there are fp32-delta"):
        encode_delta(base, random_weights("new"), tmp_path / "delta", codec="int3-delta")
    halves = {"w": torch.zeros(2).half()}
    safetensors.torch.save_file(halves, tmp_path / "halves")
    with pytest.raises(ValueError, match="kept in fp32, but w is F16"):
        encode_delta(tmp_path / "halves", halves, tmp_path / "delta")
    twice = {"w": torch.zeros(2, 2), "w:scale": torch.zeros(2)}
    with pytest.raises(ValueError, match="w:scale stands for two things"):
        encode_delta(save(tmp_path / "twice", twice), twice, tmp_path / "delta", codec="int8-delta")


# --- decoding ---


@every_codec
@PROPERTY
@given(start=st.integers(0, 199), size=st.integers(0, 200), cols=st.sampled_from([1, 3, 50, 200]))
def test_any_range_decodes_to_that_part_of_the_whole(
    tmp_path: Path, codec: str, start: int, size: int, cols: int
) -> None:
    delta = random_weights("range", shapes={"w": (200 // cols, cols)})
    path = encoded(tmp_path, "delta", delta, codec)
    whole = decoded(path, codec, tmp_path / "zero")["w"].flatten()
    stop = min(start + size, len(whole))
    start = min(start, stop)
    with DeltaFile(path, codec, schema(tmp_path / "zero")) as f:
        part = f.read("w", start, torch.full((stop - start,), math.nan))
    assert part.numpy().tobytes() == whole[start:stop].numpy().tobytes()


# --- what must not be merged ---


@every_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["embedding", "scale"])
def test_one_value_that_is_not_finite_is_found_by_both_sides(
    tmp_path: Path, base: Path, codec: str, value: float, name: str
) -> None:
    new = random_weights("new")
    new[name].view(-1)[-1] = value
    assert encode_delta(base, new, tmp_path / "delta", codec=codec) == math.inf
    assert delta_norm(tmp_path / "delta", codec, schema(base)) == math.inf


def test_the_largest_finite_values_are_no_false_alarm(tmp_path: Path, base: Path) -> None:
    huge = torch.finfo(torch.float32).max
    delta = {name: torch.full_like(t, huge) for name, t in random_weights("d").items()}
    norm = delta_norm(save(tmp_path / "delta", delta), "fp32-delta", schema(base))
    assert norm == pytest.approx(huge * math.sqrt(11 * 7 + 7 + 1), rel=1e-12)


HOSTILE = {
    "no scale": lambda t: t.pop("embedding:scale"),
    "short scale": lambda t: t.update({"embedding:scale": torch.ones(10)}),
    "scale of elements": lambda t: t.update({"embedding:scale": torch.ones(11, 7)}),
    "scale in fp64": lambda t: t.update({"embedding:scale": torch.ones(11).double()}),
    "turned": lambda t: t.update({"embedding": t["embedding"].T.contiguous()}),
    "fp32 values": lambda t: t.update({"embedding": t["embedding"].float()}),
    "renamed": lambda t: t.update({"embeddings": t.pop("embedding")}),
    "extra": lambda t: t.update({"gain:scale": torch.ones(1)}),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_payload_of_another_form_is_refused_by_name(
    tmp_path: Path, base: Path, change: str
) -> None:
    encode_delta(base, random_weights("new"), tmp_path / "delta", codec="int8-delta")
    stored = load_weights(tmp_path / "delta")
    HOSTILE[change](stored)
    safetensors.torch.save_file(stored, tmp_path / "delta")
    with pytest.raises(ValueError, match=r"delta: tensor (embedding|gain)"):
        DeltaFile(tmp_path / "delta", "int8-delta", schema(base))


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.4e38])
def test_a_scale_that_decodes_to_no_number_is_found(
    tmp_path: Path, base: Path, value: float
) -> None:
    encode_delta(base, random_weights("new"), tmp_path / "delta", codec="int8-delta")
    stored = load_weights(tmp_path / "delta")
    stored["embedding:scale"][3] = value
    safetensors.torch.save_file(stored, tmp_path / "delta")
    assert delta_norm(tmp_path / "delta", "int8-delta", schema(base)) == math.inf


def test_a_payload_of_another_codec_is_refused(tmp_path: Path, base: Path) -> None:
    for written in CODECS:
        encode_delta(base, random_weights("new"), tmp_path / "delta", codec=written)
        for read in set(CODECS) - {written}:
            with pytest.raises(ValueError, match="delta: tensor"):
                delta_norm(tmp_path / "delta", read, schema(base))


class Calls:
    """Unpickling this would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


@every_codec
def test_a_damaged_file_is_refused_and_never_run(tmp_path: Path, base: Path, codec: str) -> None:
    encode_delta(base, random_weights("new"), tmp_path / "good", codec=codec)
    good = (tmp_path / "good").read_bytes()
    header = int.from_bytes(good[:8], "little")
    padded = (header + 100_000).to_bytes(8, "little") + good[8 : 8 + header] + b" " * 100_000
    for content in [
        b"",
        b"not safetensors at all",
        pickle.dumps(Calls(tmp_path / "ran")),
        good[:-1],
        good + b"\0",
        padded + good[8 + header :],
    ]:
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            delta_norm(tmp_path / "bad", codec, schema(base))
    assert not (tmp_path / "ran").exists()


@PROPERTY
@given(
    changes=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=3)
)
def test_bytes_changed_anywhere_are_a_refusal_or_another_number(
    tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    delta = encoded(tmp_path, "delta", random_weights("new"), "int8-delta")
    content = bytearray(delta.read_bytes())
    for place, value in changes:
        content[place % len(content)] = value
    delta.write_bytes(content)
    try:
        norm = delta_norm(delta, "int8-delta", schema(tmp_path / "zero"))
    except ValueError:
        return
    assert norm >= 0


# --- golden file: `REWRITE_GOLDEN=1 pytest` after a change that is meant to change results ---


def test_every_codec_decodes_as_in_the_golden_file(tmp_path: Path) -> None:
    """The payload's sha256 and the decoded values to the bit: the same on every machine."""
    draw = philox("golden codec")
    delta = {
        name: torch.from_numpy((2.0**-20 * draw.integers(-9999, 9999, shape)).astype("float32"))
        for name, shape in {"a": (3, 5), "b": (4,)}.items()
    }
    found = {}
    for codec in CODECS:
        path = encoded(tmp_path, "delta", delta, codec)
        save_weights(tmp_path / "decoded", decoded(path, codec, tmp_path / "zero"))
        values = hexadecimal(tmp_path / "decoded")
        found[codec] = {"sha256": sha256_file(path).sha256, "decoded": values}
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


@pytest.mark.gpu
@every_codec
def test_weights_on_a_gpu_are_encoded_there(tmp_path: Path, base: Path, codec: str) -> None:
    new = random_weights("new")
    on_gpu = {name: t.cuda() for name, t in new.items()}
    encode_delta(base, new, tmp_path / "cpu", codec=codec)
    encode_delta(base, on_gpu, tmp_path / "gpu", codec=codec)
    assert sha256_file(tmp_path / "cpu") == sha256_file(tmp_path / "gpu")
