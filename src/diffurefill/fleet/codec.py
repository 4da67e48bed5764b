"""Contributions on the wire. `fp32-delta`: what local training added to the base, in fp32.

A delta and not the weights: 16 bits of a weight are a coarse step for a late, small update, while
a delta keeps its relative precision when it is compressed (spec fleet.md 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffurefill.train.tensorfile import (
    CHUNK_ELEMENTS,
    Schema,
    StreamingWriter,
    TensorFile,
    chunks,
    require_schema,
    schema_of,
)

CODEC = "fp32-delta"


@dataclass(frozen=True)
class DeltaFacts:
    """What the merger must know of a delta before it may enter the mean."""

    finite: bool
    norm: float
    """L2 over all elements; infinity where it is not finite or cannot be computed."""
    schema_matches: bool


def encode_delta(
    base_path: Path,
    new: Mapping[str, Tensor],
    dest: Path,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> None:
    """Write `new - base` to `dest`, holding one chunk; `new` may lie on any device.

    Raises ValueError that names the tensor when `new` and the base differ in names, dtypes, shapes.
    """
    buffer = torch.empty(chunk_elements)
    with TensorFile(base_path) as base:
        require_schema(schema_of(new), base.schema, "the new weights")
        with StreamingWriter(dest, base.schema) as out:
            for name, start, stop in chunks(base.schema, chunk_elements):
                piece = base.read(name, start, buffer[: stop - start])
                trained = new[name].detach().reshape(-1)[start:stop].cpu()
                out.write(name, torch.sub(trained, piece, out=piece))


def inspect_delta(
    path: Path, base_schema: Schema, *, chunk_elements: int = CHUNK_ELEMENTS
) -> DeltaFacts:
    """Read the delta once, chunk by chunk. A damaged file is one whose schema does not match."""
    buffer = torch.empty(chunk_elements)
    try:
        with TensorFile(path) as delta:
            require_schema(delta.schema, base_schema, path)
            squares = 0.0
            for name, start, stop in chunks(delta.schema, chunk_elements):
                piece = delta.read(name, start, buffer[: stop - start])
                # In fp64: squares of finite fp32 values must not overflow into a false alarm.
                squares += float(piece.double().square_().sum())
    except ValueError:
        return DeltaFacts(finite=False, norm=math.inf, schema_matches=False)
    finite = math.isfinite(squares)
    return DeltaFacts(finite, math.sqrt(squares) if finite else math.inf, schema_matches=True)
