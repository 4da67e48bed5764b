"""What a training step needs of memory, before it is taken; and how many rows fit at once.

The prediction runs the step itself, on tensors that have shapes and no data, and counts what lives:
weights, gradients, moments, whatever autograd saves, logits. No formula has to follow the model.

It is made as on a CPU, so what only a GPU does differently is not in it: blocks that are compiled
save less, and Muon's batches take a few GB more while nothing else is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diffurefill.config import ObjectiveConfig, RunConfig
from diffurefill.model.denoiser import Denoiser
from diffurefill.objective.head import CHUNK_BYTES
from diffurefill.optim.adamw import RunOptimizer, build_optimizer
from diffurefill.train.gradients import (
    PAD_TO,
    Arithmetic,
    arithmetic_of,
    autocast,
    forward_backward,
    head_copy,
)
from diffurefill.train.live_bytes import WORKING, LiveBytes

KINDS = ("weights", "gradients", "optimiser", "16-bit copies", "activations", "logits", WORKING)
"""optimiser: its moments. activations: what the backward pass waits for. logits: everything as
wide as the vocabulary. working: whatever passes, at that moment."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Footprint:
    """Of a step at the moment when it holds most."""

    rows: int
    bytes_by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes_by_kind.values())


def predict(config: RunConfig, how: Arithmetic, rows: int, masked_share: float) -> Footprint:
    """The footprint with `rows` rows at once, `masked_share` of whose positions are masked."""
    vocab_size = config.model.vocab_size

    def kind_of(func: Any, args: tuple[Any, ...], out: Tensor) -> str:
        return _kind(ledger, vocab_size, func, args, out)

    with FakeTensorMode(), LiveBytes(kind_of) as ledger:
        model = Denoiser(config.model)
        ledger.name(model.parameters(), "weights")
        optimizer = build_optimizer(model, config.optim)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(
                lambda p: ledger.name([p.grad] if p.grad is not None else [], "gradients")
            )
        optimizer.step()
        ledger.name(_moments(optimizer), "optimiser")
        if rows >= config.train.batch_rows:
            optimizer.zero_grad()  # a lone micro-batch meets no gradients of an earlier one
        else:
            ledger.name((p.grad for p in model.parameters() if p.grad is not None), "gradients")
        ledger.forget_peak()
        _micro_batch(model, how, ledger, (rows, config.data.row_length), masked_share)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
    return Footprint(rows, {kind: ledger.peak[kind] for kind in KINDS})


def _micro_batch(
    model: Denoiser, how: Arithmetic, ledger: LiveBytes, shape: tuple[int, int], share: float
) -> None:
    B, T = shape
    filled = -(-math.ceil(B * T * share) // how.pad_to) * how.pad_to
    N = min(filled, B * T)
    canvas, wanted, targets = (torch.zeros(n, dtype=torch.int64) for n in (shape, N, N))

    def saved(tensor: Tensor) -> Tensor:
        if ledger.kind(tensor) == WORKING:
            ledger.name([tensor], "activations")
        return tensor

    with (
        autocast(CPU, how.dtype),
        torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor),
    ):
        cast = head_copy(model, how)
        forward_backward(model, how, canvas, None, wanted, targets, torch.zeros(N), cast)


def _kind(ledger: LiveBytes, vocab_size: int, func: Any, args: tuple[Any, ...], out: Tensor) -> str:
    is_cast = func is torch.ops.aten._to_copy.default
    if is_cast and ledger.kind(args[0]) == "weights":
        return "16-bit copies"
    return "logits" if out.ndim == 2 and out.shape[-1] == vocab_size else WORKING


def _moments(optimizer: RunOptimizer) -> Iterable[Tensor]:
    for part in optimizer.parts.values():
        for state in part.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


# --- what it is run with -------------------------------------------------------------------------


def arithmetic_on(device_type: str, config: RunConfig) -> Arithmetic:
    """Of training on a device that may be elsewhere: a GPU that is not here has bf16."""
    if device_type == "cuda" and not torch.cuda.is_available():
        dtype = None if config.train.precision == "fp32" else torch.bfloat16
        return Arithmetic(dtype, CHUNK_BYTES, PAD_TO, config.train.activation_budget)
    how = arithmetic_of(torch.device(device_type), config.train)
    # Every 16-bit type has the same size, and a CPU knows bf16 best.
    return replace(how, dtype=how.dtype and torch.bfloat16)


def largest_masked_share(objective: ObjectiveConfig, rows: int, *, causal: bool) -> float:
    """Of a micro-batch of `rows` rows, three deviations above the mean: a run meets that.

    A row's share is t (1 - c u): t ~ U(t_min, 1), c = 1 with probability prefix_rows, u ~ U(0, 1).
    """
    if causal:
        return 1.0
    low, p = objective.t_min, objective.prefix_rows
    mean_t, square_t = (1 + low) / 2, (1 + low + low * low) / 3
    mean = mean_t * (1 - p / 2)
    variance = square_t * (1 - p + p / 3) - mean * mean
    return min(1.0, mean + 3 * math.sqrt(variance / rows))
