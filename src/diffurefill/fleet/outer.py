"""Outer steps: how the global moves along the mean of the workers' deltas.

theta is the global, theta_w a worker's weights, and the pseudo-gradient is
D = theta - mean_w(theta_w), the mean delta with its sign turned.

    replacement  theta' = mean_w(theta_w)
    sgd          theta' = theta - lr D                                      lr 1 is replacement
    nesterov     m <- momentum m + D;  theta' = theta - lr (D + momentum m)
    orthogonal   theta' = theta - lr O(D);  for a matrix of the blocks D = U S V^T,
                 O(D) = s U V^T with s = |D|_F / sqrt(rank); for any other tensor O(D) = D

Every rule reads the mean piece by piece and returns what to add to theta. All but `orthogonal` are
single elementwise fp32 operations in a stated order: the same bits on every machine. A singular
value decomposition has no such order, so `orthogonal` repeats its bits only with the same torch
build on the same kind of processor. Source: spec algorithms.md 3.5.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.fleet.pieces import Scratch
from diffurefill.optim.adamw import FUSED_PIECES
from diffurefill.train.tensorfile import (
    CHUNK_ELEMENTS,
    Schema,
    StreamingWriter,
    TensorFile,
    require_schema,
)

OUTER_STEPS = ("replacement", "sgd", "nesterov", "orthogonal")


class Reader(Protocol):
    """Something that has a value for every element of the model."""

    def read(self, name: str, start: int, out: Tensor) -> Tensor:
        """Fill `out` (flat fp32) with the elements of tensor `name` from `start` on."""
        ...


def require_outer_step(kind: str, lr: float, momentum: float) -> None:
    """Raises UserError for a rule that does not exist, or a number that it would ignore."""
    if kind not in OUTER_STEPS:
        raise UserError(f"no outer step {kind!r}; there are {', '.join(OUTER_STEPS)}")
    if not (math.isfinite(lr) and lr > 0.0):
        raise UserError(f"outer_lr must be a positive number, not {lr}")
    if not 0.0 <= momentum < 1.0:
        raise UserError(f"outer_momentum must lie in [0, 1), not {momentum}")
    if kind == "replacement" and lr != 1.0:
        raise UserError("replacement takes no outer_lr: choose sgd, or leave outer_lr at 1")
    if kind != "nesterov" and momentum != 0.0:
        raise UserError(f"{kind} has no momentum: choose nesterov, or leave outer_momentum at 0")


class Sgd:
    """lr times the mean delta."""

    def __init__(self, mean: Reader, lr: float) -> None:
        self._mean, self._lr = mean, lr

    def read(self, name: str, start: int, out: Tensor) -> Tensor:
        return self._mean.read(name, start, out).mul_(self._lr)


class Nesterov:
    """Reads the last momentum (None: it starts at zero) and writes the new one to `following`.

    Each element must be read once.
    """

    def __init__(
        self,
        mean: Reader,
        *,
        lr: float,
        momentum: float,
        previous: TensorFile | None,
        following: StreamingWriter,
    ) -> None:
        self._mean, self._lr, self._momentum = mean, lr, momentum
        self._previous, self._following = previous, following
        self._scratch = Scratch()
        self._squares: list[tuple[float, float]] = []
        """Of every piece: of the mean delta and of the step."""

    def gain(self) -> float:
        """Length of the step over that of the mean delta; 0 where nobody moved."""
        mean, step = (math.fsum(part) for part in zip(*self._squares, strict=True))
        return math.sqrt(step / mean) if mean > 0.0 else 0.0

    def read(self, name: str, start: int, out: Tensor) -> Tensor:
        gradient = self._mean.read(name, start, out).neg_()
        mean_square = _square(gradient)
        m = self._scratch.get("m", len(out))
        if self._previous is None:
            m.copy_(gradient)
        else:
            self._previous.read(name, start, m).mul_(self._momentum).add_(gradient)
        self._following.write(name, m, start)
        step = gradient.add_(m.mul_(self._momentum)).mul_(self._lr).neg_()
        self._squares.append((mean_square, _square(step)))
        return step


def _square(piece: Tensor) -> float:
    """In fp32: for the log, which nothing rests on."""
    return float(piece.dot(piece))


class Orthogonal:
    """Holds one whole matrix and its decomposition at a time; other tensors pass through.

    To be read in the order of the file, by one thread.
    """

    def __init__(self, mean: Reader, lr: float, schema: Schema) -> None:
        self._mean, self._lr, self._schema = mean, lr, schema
        self._name, self._step = "", torch.empty(0)

    def read(self, name: str, start: int, out: Tensor) -> Tensor:
        shape = self._schema[name][1]
        pieces = num_matrices(name, shape)
        if not pieces:
            return self._mean.read(name, start, out).mul_(self._lr)
        if name != self._name:
            self._name, self._step = name, self._whole(name, shape, pieces)
        return out.copy_(self._step[start : start + len(out)]).mul_(self._lr)

    def _whole(self, name: str, shape: tuple[int, ...], pieces: int) -> Tensor:
        flat = torch.empty(math.prod(shape))
        for start in range(0, len(flat), CHUNK_ELEMENTS):
            self._mean.read(name, start, flat[start : start + CHUNK_ELEMENTS])
        for matrix in flat.view(pieces, -1, shape[1]):
            matrix.copy_(orthogonal_direction(matrix))
        return flat


def num_matrices(name: str, shape: tuple[int, ...]) -> int:
    """How many matrices the tensor holds along its rows; 0 when it is not a matrix of a block.

    Muon's choice (optim/adamw.py): not the embedding, which is also the head; qkv and gate_up cut.
    """
    if not (name.startswith("blocks.") and len(shape) == 2 and math.prod(shape) > 0):
        return 0
    return FUSED_PIECES.get(".".join(name.split(".")[-2:]), 1)


def orthogonal_direction(matrix: Tensor) -> Tensor:
    """U V^T |matrix|_F / sqrt(rank): equal singular values, the norm kept. Zero stays zero.

    The rank counts singular values above fp32's noise; directions below it stay at zero.
    """
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
    if norm == 0.0:
        return torch.zeros_like(matrix)
    # Scaled to norm 1 before: squares of small deltas must not fall out of fp32's range.
    u, s, vh = torch.linalg.svd(matrix / norm, full_matrices=False)
    kept = s > s[0] * max(matrix.shape) * torch.finfo(torch.float32).eps
    rank = int(kept.sum())
    return (u[:, kept] @ vh[kept]).mul_(norm / math.sqrt(rank))


def open_momentum(
    stack: contextlib.ExitStack, path: Path | None, schema: Schema
) -> TensorFile | None:
    """The momentum that the last merge left, closed by `stack`; ValueError for other weights'."""
    if path is None:
        return None
    momentum = stack.enter_context(TensorFile(path))
    require_schema(momentum.schema, schema, path)
    return momentum
