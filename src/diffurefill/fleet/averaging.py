"""The merge of weight files, streamed: memory does not grow with the model or with the workers.

Every step is one elementwise fp32 operation, rounded once, in a stated order. So the result does
not depend on the chunk size, on threads or on the machine, a merger that died leaves nothing that
another could not compute again to the same sha256, and `audit` recomputes a published global bit
for bit (spec hub.md D, fleet.md I9). The exception is the orthogonal outer step: see outer.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffurefill.fleet import outer
from diffurefill.fleet.codec import (
    CODEC,
    CODECS,
    DeltaFile,
    DeltaWriter,
    decoded_schema,
    delta_norm,
    formats_of,
    unit_chunks,
)
from diffurefill.fleet.folds import fold_all, following
from diffurefill.fleet.pieces import Scratch, for_each
from diffurefill.fleet.records import Fold, Inspection, Payload
from diffurefill.train.checkpoint import schema
from diffurefill.train.tensorfile import (
    CHUNK_ELEMENTS,
    Schema,
    StreamingWriter,
    TensorFile,
    chunks,
)

UPDATE_CODEC = "int8-delta"
"""Of the step from a global to the next that workers may fetch instead of the global itself."""


class FileAverager:
    """The merger's arithmetic on weight files (merger.Averager); every global is fp32."""

    codecs = CODECS

    def __init__(
        self,
        outer_step: str = "replacement",
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        """Raises UserError for a rule that is not known or a number that it would ignore."""
        outer.require_outer_step(outer_step, outer_lr, outer_momentum)
        self._kind, self._lr, self._momentum = outer_step, outer_lr, outer_momentum
        self._chunk_elements = chunk_elements
        self.needs_momentum = outer_step == "nesterov"
        self.outer_gain: float | None = None

    # --- contributions ---------------------------------------------------------------------------

    def inspect(self, payload: Path, codec: str, base: Path) -> Inspection:
        """Why `payload` may not be merged (`codec`, `schema`, `nonfinite`, None), and its norm."""
        if codec not in self.codecs:
            return Inspection("codec", math.inf)
        base_schema = schema(base)
        try:
            norm = delta_norm(payload, codec, base_schema, chunk_elements=self._chunk_elements)
        except ValueError:
            return Inspection("schema", math.inf)
        return Inspection(None if math.isfinite(norm) else "nonfinite", norm)

    def cosines(self, payloads: Sequence[Payload]) -> list[float]:
        """Cosine of each delta with the sum of the others; a lone one has 1.0, a zero one 0.0.

        From all inner products, in fp64. Raises ValueError when two deltas differ in their tensors.
        """
        if len(payloads) < 2:
            return [1.0] * len(payloads)
        products = self._inner_products(payloads)
        found = []
        for i in range(len(payloads)):
            others = [j for j in range(len(payloads)) if j != i]
            across = float(products[i, others].sum())
            lengths = float(products[i, i]) * float(products[others][:, others].sum())
            # Where the others cancel out, rounding may leave a sum of squares below zero.
            cosine = across / math.sqrt(lengths) if lengths > 0.0 else 0.0
            found.append(min(max(cosine, -1.0), 1.0))
        return found

    def _inner_products(self, payloads: Sequence[Payload]) -> Tensor:
        """(N, N) in fp64. The deltas share the memory of a few chunks, however many they are."""
        n, size = len(payloads), max(self._chunk_elements // len(payloads), 1)
        weights = decoded_schema(payloads[0].path, payloads[0].codec)
        products, rows = torch.zeros(n, n, dtype=torch.float64), torch.empty(n, size)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(DeltaFile(p.path, p.codec, weights)) for p in payloads]
            for name, start, stop in chunks(weights, size):
                for f, row in zip(files, rows, strict=True):
                    f.read(name, start, row[: stop - start])
                values = rows[:, : stop - start].double()
                products.addmm_(values, values.T)
        return products

    # --- merging ---------------------------------------------------------------------------------

    def merge(
        self,
        base: Path,
        payloads: Sequence[Payload],
        dest: Path,
        *,
        momentum: Path | None = None,
        momentum_dest: Path | None = None,
        update_dest: Path | None = None,
        folds: Sequence[Fold] = (),
    ) -> None:
        """Write the outer step of `base` along the weighted mean of the decoded deltas to `dest`.

        The exact order, with `payloads` in the order of the sum and token counts as weights:

            share_w = fp32(weight_w / fsum(weights))      the quotient in fp64, then rounded
            mean    = share_0 * delta_0
            mean    = mean + (share_w * delta_w)          for w = 1, 2, ...; never fused
            step    = mean, or what the outer step makes of it (outer.py)
            dest    = base + step

        With `update_dest` the step is first rounded to int8 per row and written there, and `dest`
        is `base` plus what `apply_update` decodes from it. `folds` are made in the same pass.
        Nesterov reads `momentum` (None: zero) and writes `momentum_dest`. Each file appears whole.
        Raises ValueError for no payloads, a weight that is not positive, a tensor that differs.
        """
        if self.needs_momentum != (momentum_dest is not None):
            raise ValueError("momentum_dest goes with the nesterov outer step, and only with it")
        with contextlib.ExitStack() as stack:
            old = stack.enter_context(TensorFile(base))
            step = self._step(stack, old.schema, payloads, momentum, momentum_dest)
            if update_dest is not None:
                update = stack.enter_context(DeltaWriter(update_dest, UPDATE_CODEC, old.schema))
            else:
                update = None
            out = stack.enter_context(StreamingWriter(dest, old.schema))
            sides = [stack.enter_context(following(fold, old.schema)) for fold in folds]
            scratch = Scratch()

            def work(name: str, start: int, stop: int) -> None:
                moved = step.read(name, start, scratch.get("step", stop - start))
                if update is not None:
                    update.write(name, start, moved)
                new = old.read(name, start, scratch.get("new", stop - start)).add_(moved)
                out.write(name, new, start)
                for follow in sides:
                    follow(name, start, new)

            aligned = formats_of(UPDATE_CODEC if update_dest else CODEC, old.schema)
            pieces = unit_chunks(old.schema, aligned, self._chunk_elements)
            for_each(work, pieces, in_turn=self._kind == "orthogonal")
            self.outer_gain = step.gain() if isinstance(step, outer.Nesterov) else None

    def fold(self, new: Path, folds: Sequence[Fold]) -> None:
        """The folds of a merge that was published without them: the same bytes."""
        fold_all(new, folds, chunk_elements=self._chunk_elements)

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        """Write `base` plus the decoded `update`: byte for byte the `dest` of the merge."""
        with contextlib.ExitStack() as stack:
            old = stack.enter_context(TensorFile(base))
            step = stack.enter_context(DeltaFile(update, UPDATE_CODEC, old.schema))
            out = stack.enter_context(StreamingWriter(dest, old.schema))
            scratch = Scratch()

            def work(name: str, start: int, stop: int) -> None:
                moved = step.read(name, start, scratch.get("step", stop - start))
                new = old.read(name, start, scratch.get("new", stop - start))
                out.write(name, new.add_(moved), start)

            for_each(work, chunks(old.schema, self._chunk_elements))

    def _step(
        self,
        stack: contextlib.ExitStack,
        base: Schema,
        payloads: Sequence[Payload],
        momentum: Path | None,
        momentum_dest: Path | None,
    ) -> outer.Reader:
        """The outer step as a reader over files that `stack` closes."""
        shares = _shares([p.weight for p in payloads])
        files = [stack.enter_context(DeltaFile(p.path, p.codec, base)) for p in payloads]
        mean = Mean(files, shares)
        if self._kind == "replacement":
            return mean
        if self._kind == "sgd":
            return outer.Sgd(mean, self._lr)
        if self._kind == "orthogonal":
            return outer.Orthogonal(mean, self._lr, base)
        assert momentum_dest is not None
        return outer.Nesterov(
            mean,
            lr=self._lr,
            momentum=self._momentum,
            previous=outer.open_momentum(stack, momentum, base),
            following=stack.enter_context(StreamingWriter(momentum_dest, base)),
        )


class Mean:
    """The weighted mean of decoded deltas, piece by piece; see `merge` for its exact order."""

    def __init__(self, files: Sequence[DeltaFile], shares: Sequence[float]) -> None:
        self._files, self._shares = files, shares
        self._scratch = Scratch()

    def read(self, name: str, start: int, out: Tensor) -> Tensor:
        piece = self._scratch.get("piece", len(out))
        # The first product starts the sum: 0 + x would turn -0.0 into 0.0.
        self._files[0].read(name, start, out).mul_(self._shares[0])
        for f, share in zip(self._files[1:], self._shares[1:], strict=True):
            # Two roundings, not add_(alpha=): its vector lanes fuse, its last elements may not.
            out.add_(f.read(name, start, piece).mul_(share))
        return out


def _shares(weights: Sequence[float]) -> list[float]:
    if not weights:
        raise ValueError("a mean needs at least one delta")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of a delta must be a positive number, not {weight}")
    total = math.fsum(weights)
    return [weight / total for weight in weights]
