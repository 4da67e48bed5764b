"""Side averages that follow the globals: EMA and SWA, in the pass of a merge or in a later one.

One fold is elementwise, in fp32: result = (keep * previous) + ((1 - keep) * new), with both factors
rounded to fp32 first (1 - keep in fp64), then both products, then their sum. So a fold that a dead
merger left out and another makes later has the same bytes. Source: spec algorithms.md 3.5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffurefill.fleet.pieces import Scratch, for_each
from diffurefill.fleet.records import Fold
from diffurefill.train.tensorfile import (
    CHUNK_ELEMENTS,
    Schema,
    StreamingWriter,
    TensorFile,
    chunks,
    require_schema,
)

Follow = Callable[[str, int, Tensor], None]
"""Takes a piece (tensor name, start, values) of the new weights, which stays as it is."""


@contextlib.contextmanager
def following(fold: Fold, schema: Schema) -> Generator[Follow]:
    """A side average in the making; see StreamingWriter.

    `fold.dest` may be `fold.previous`. Raises ValueError for a previous average of other tensors
    than `schema`, or a keep outside [0, 1).
    """
    keep = fold.keep
    if not 0.0 <= keep < 1.0:
        raise ValueError(f"what a fold keeps must lie in [0, 1), not {keep}")
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(StreamingWriter(fold.dest, schema))
        if fold.previous is None:
            yield lambda name, start, new: out.write(name, new, start)
            return
        previous = stack.enter_context(TensorFile(fold.previous))
        require_schema(previous.schema, schema, fold.previous)
        scratch = Scratch()

        def follow(name: str, start: int, new: Tensor) -> None:
            kept = previous.read(name, start, scratch.get("older", len(new))).mul_(keep)
            # Not add_(alpha=): its vector lanes fuse, its last elements may not.
            kept.add_(torch.mul(new, 1.0 - keep, out=scratch.get("newer", len(new))))
            out.write(name, kept, start)

        yield follow


def fold_all(new: Path, folds: Sequence[Fold], *, chunk_elements: int = CHUNK_ELEMENTS) -> None:
    """Move every side average on by the weights at `new`, which are read once."""
    with contextlib.ExitStack() as stack:
        weights = stack.enter_context(TensorFile(new))
        sides = [stack.enter_context(following(fold, weights.schema)) for fold in folds]
        scratch = Scratch()

        def work(name: str, start: int, stop: int) -> None:
            piece = weights.read(name, start, scratch.get("new", stop - start))
            for follow in sides:
                follow(name, start, piece)

        for_each(work, chunks(weights.schema, chunk_elements))


def average_last(
    paths: Sequence[Path], dest: Path, *, chunk_elements: int = CHUNK_ELEMENTS
) -> None:
    """Write the mean of the globals at `paths` to `dest`, each element rounded to fp32 once.

    Summed in fp64 in the given order. Raises ValueError for none, or when a tensor differs.
    """
    if not paths:
        raise ValueError("an average needs at least one global")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in paths]
        for f in files:
            require_schema(f.schema, files[0].schema, f.path)
        out = stack.enter_context(StreamingWriter(dest, files[0].schema))
        scratch = Scratch()

        def work(name: str, start: int, stop: int) -> None:
            piece = scratch.get("piece", stop - start)
            total = scratch.get("total", stop - start, torch.float64).zero_()
            for f in files:
                total.add_(f.read(name, start, piece))
            out.write(name, total.div_(len(files)).float(), start)

        for_each(work, chunks(files[0].schema, chunk_elements))
