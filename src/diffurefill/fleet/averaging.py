"""Averages of weights, streamed: memory does not grow with the model or with the contributions.

Every step is one elementwise fp32 operation, rounded once, in a stated order. So the result does
not depend on the chunk size, on threads or on the machine, a merger that died leaves nothing that
another could not compute again to the same sha256, and `audit` recomputes a published global bit
for bit (spec hub.md D, fleet.md I9).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from diffurefill.fleet.codec import CODEC, inspect_delta
from diffurefill.train.checkpoint import schema
from diffurefill.train.tensorfile import (
    CHUNK_ELEMENTS,
    StreamingWriter,
    TensorFile,
    chunks,
    require_schema,
)


def mean_of_deltas(
    base_path: Path,
    deltas: Sequence[tuple[Path, float]],
    dest: Path,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> None:
    """Write base + sum_w(weight_w * delta_w) / sum_w(weight_w) to `dest`; all files are fp32.

    `deltas` are (path, weight) in the order of the sum; weights are token counts. The exact order:

        share_w = fp32(weight_w / fsum(weights))      the quotient in fp64, then rounded
        total   = share_0 * delta_0
        total   = total + (share_w * delta_w)         for w = 1, 2, ...; never fused
        result  = base + total

    Raises ValueError for no deltas, a weight that is not positive, or a tensor that differs.
    """
    shares = _shares([weight for _, weight in deltas])
    piece, total = torch.empty(2, chunk_elements)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(TensorFile(base_path))
        files = [stack.enter_context(TensorFile(path)) for path, _ in deltas]
        for f in files:
            require_schema(f.schema, base.schema, f.path)
        out = stack.enter_context(StreamingWriter(dest, base.schema))
        for name, start, stop in chunks(base.schema, chunk_elements):
            a, b = total[: stop - start], piece[: stop - start]
            # The first product starts the sum: 0 + x would turn -0.0 into 0.0.
            files[0].read(name, start, a).mul_(shares[0])
            for f, share in zip(files[1:], shares[1:], strict=True):
                # Two roundings, not add_(alpha=): its vector lanes fuse, its last elements may not.
                a.add_(f.read(name, start, b).mul_(share))
            out.write(name, torch.add(base.read(name, start, b), a, out=a))


def exponential_average(
    previous_path: Path | None,
    new_path: Path,
    decay: float,
    dest: Path,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> None:
    """Write decay * previous + (1 - decay) * new to `dest`; without a previous one, new itself.

    Both factors are rounded to fp32 (1 - decay in fp64 first), then both products, then their sum.
    `dest` may be `previous_path`. Raises ValueError when a tensor differs or for a decay outside
    [0, 1).
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay must lie in [0, 1), not {decay}")
    older, newer = torch.empty(2, chunk_elements)
    with contextlib.ExitStack() as stack:
        new = stack.enter_context(TensorFile(new_path))
        previous = stack.enter_context(TensorFile(previous_path)) if previous_path else None
        if previous:
            require_schema(previous.schema, new.schema, previous.path)
        out = stack.enter_context(StreamingWriter(dest, new.schema))
        for name, start, stop in chunks(new.schema, chunk_elements):
            a = new.read(name, start, newer[: stop - start])
            if previous:
                b = previous.read(name, start, older[: stop - start])
                a.mul_(1.0 - decay).add_(b.mul_(decay))
            out.write(name, a)


def _shares(weights: Sequence[float]) -> list[float]:
    if not weights:
        raise ValueError("a mean needs at least one delta")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of a delta must be a positive number, not {weight}")
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class FileAverager:
    """The merger's arithmetic on weight files (merger.Averager)."""

    codec = CODEC

    def fault(self, payload: Path, base: Path) -> str | None:
        """Why `payload` may not be merged: `schema`, `nonfinite`, or None when it may."""
        facts = inspect_delta(payload, schema(base))
        if not facts.schema_matches:
            return "schema"
        return None if facts.finite else "nonfinite"

    def mean(self, base: Path, payloads: Sequence[tuple[Path, float]], dest: Path) -> None:
        mean_of_deltas(base, payloads, dest)

    def ema(self, previous: Path | None, new: Path, decay: float, dest: Path) -> None:
        exponential_average(previous, new, decay, dest)
