"""Small weights and their files, for the tests of codecs, merges and adoption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from diffurefill.fleet.codec import DeltaFile, encode_delta
from diffurefill.fleet.records import Payload
from diffurefill.runtime import philox
from diffurefill.train.checkpoint import load_weights, save_weights, schema

PROPERTY = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPES = {"embedding": (11, 7), "gain": (7,), "scale": (), "none": (0, 3), "hollow": (3, 0)}

Weights = dict[str, Tensor]


def random_weights(*key: int | str, shapes: dict[str, tuple[int, ...]] | None = None) -> Weights:
    """Values of very different size, so that any other order of a sum shows."""
    draw = philox("weights", *key)
    return {
        name: torch.from_numpy(
            np.asarray(draw.standard_normal(shape) * 10.0 ** draw.integers(-4, 4, shape), "float32")
        )
        for name, shape in (shapes or SHAPES).items()
    }


def save(path: Path, weights: Weights) -> Path:
    save_weights(path, weights)
    return path


def bits(weights: Weights) -> dict[str, bytes]:
    return {name: t.contiguous().numpy().tobytes() for name, t in sorted(weights.items())}


def payloads(folder: Path, deltas: list[tuple[Weights, float]]) -> list[Payload]:
    """fp32 contributions on disk."""
    return [
        Payload(save(folder / f"delta{i}", delta), "fp32-delta", weight)
        for i, (delta, weight) in enumerate(deltas)
    ]


def encoded(folder: Path, name: str, delta: Weights, codec: str) -> Path:
    """`delta` as a file of `codec`."""
    zero = save(folder / "zero", {n: torch.zeros_like(t) for n, t in delta.items()})
    encode_delta(zero, delta, folder / name, codec=codec)
    return folder / name


def decoded(path: Path, codec: str, base: Path) -> Weights:
    """The whole delta of a payload."""
    base_schema = schema(base)
    with DeltaFile(path, codec, base_schema) as f:
        return {
            name: f.read(name, 0, torch.empty(shape).flatten()).reshape(shape)
            for name, (_, shape) in base_schema.items()
        }


def hexadecimal(path: Path) -> dict[str, list[str]]:
    """Every value to the last bit, for golden files."""
    return {
        name: [value.hex() for value in t.flatten().tolist()]
        for name, t in sorted(load_weights(path).items())
    }
