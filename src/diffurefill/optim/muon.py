"""Muon: momentum whose update is orthogonalised.

Arguments and results are those of torch.optim.Muon, which works one matrix at a time and always in
bf16. This one batches matrices of equal shape (large ones on CPU go one by one, in fp32 by their
spectrum), cuts fused matrices apart, and lets the arithmetic be chosen. One difference: `eps` is
added to the norm, where torch takes the larger of the two.

Scale 0.2 sqrt(max(rows, cols)): Moonlight (arXiv:2502.16982); with it AdamW's learning rate and
weight decay apply unchanged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffurefill.optim.newton_schulz import (
    COEFFICIENTS,
    EPS,
    STEPS,
    Iteration,
    one_by_one,
    orthogonalise,
    orthogonalise_one,
)

Work = tuple[Tensor, Tensor, dict[str, Any]]
"""A parameter, its gradient and its group."""

SCALES: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
}
"""`adjust_lr_fn`: the factor of the learning rate for a matrix of (rows, cols)."""


class Batch(NamedTuple):
    """What matrices share that are orthogonalised together."""

    shape: tuple[int, int]
    """Of a piece."""
    device: torch.device
    iteration: Iteration


class Muon(torch.optim.Optimizer):
    """For matrices only. Beyond torch.optim.Muon's arguments a group may name

    num_pieces: how many matrices are stacked along its parameters' rows (3 in a fused qkv), each
        orthogonalised, and scaled, by itself;
    ns_dtype: "auto" (bf16 where the hardware has it, else fp32) or a torch dtype.

    Updates are within 1% (bf16) or 2% (fp32) of the norm of torch's where the gradient is well
    conditioned. Where it is nearly of low rank, bf16, torch's too, is far from the polynomial.

    Raises ValueError for a parameter that is no matrix or does not divide into its pieces, and for
    an unknown `adjust_lr_fn`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str | torch.dtype = "auto",
        num_pieces: int = 1,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "num_pieces": num_pieces,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Groups of a state saved before an argument existed take this optimiser's default."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches: dict[Batch, list[Work]] = defaultdict(list)
        for group in self.param_groups:
            iteration = _iteration(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows, cols = parameter.shape
                    shape = (rows // group["num_pieces"], cols)
                    batch = Batch(shape, parameter.device, iteration)
                    batches[batch].append((parameter, parameter.grad, group))
        for batch, work in batches.items():
            if one_by_one(batch.shape, batch.device):
                for parameter, grad, group in work:
                    self._update_alone(batch, parameter, grad, group)
            else:
                self._update_together(batch, work)
        return loss

    def _update_together(self, batch: Batch, work: list[Work]) -> None:
        """One step of all parameters of `batch`, orthogonalised in one call."""
        directions = [
            self._direction(parameter, grad, group).view(-1, *batch.shape)
            for parameter, grad, group in work
        ]
        updates = orthogonalise(torch.cat(directions), batch.iteration)
        for (parameter, _, group), update in zip(
            work, updates.split([len(d) for d in directions]), strict=True
        ):
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            update = update.reshape(parameter.shape).to(parameter.dtype)
            parameter.add_(update, alpha=-_rate(group, batch.shape))

    def _update_alone(
        self, batch: Batch, parameter: Tensor, grad: Tensor, group: dict[str, Any]
    ) -> None:
        """One step of one parameter, piece by piece, while each piece is in the cache."""
        pieces = self._direction(parameter, grad, group).view(-1, *batch.shape)
        for weight, piece in zip(parameter.view(-1, *batch.shape), pieces, strict=True):
            update = orthogonalise_one(piece, batch.iteration).to(parameter.dtype)
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-_rate(group, batch.shape))

    def _direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """The running mean after `grad` has entered it; with `nesterov` a look ahead of it."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        mean = state["momentum"].lerp_(grad, 1.0 - group["momentum"])
        return grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean


def _iteration(group: dict[str, Any]) -> Iteration:
    dtype = None if group["ns_dtype"] == "auto" else _dtype(group["ns_dtype"])
    coefficients = tuple(group["ns_coefficients"])
    return Iteration(coefficients, group["ns_steps"], group["eps"], dtype)


def _dtype(name: str | torch.dtype) -> torch.dtype:
    """A torch dtype, or its name: a state that is written to a file can hold only the name."""
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f'ns_dtype must be "auto" or a floating torch dtype, not {name!r}')
    return dtype


def _rate(group: dict[str, Any], shape: tuple[int, int]) -> float:
    return group["lr"] * SCALES[group["adjust_lr_fn"]](*shape)


def _check(group: dict[str, Any]) -> None:
    if group["adjust_lr_fn"] not in SCALES:
        known = ", ".join(repr(name) for name in SCALES)
        raise ValueError(f"adjust_lr_fn must be one of {known}, not {group['adjust_lr_fn']!r}")
    for name in ("lr", "weight_decay", "momentum"):
        if group[name] < 0:
            raise ValueError(f"{name} must be at least 0, not {group[name]}")
    _iteration(group)
    for parameter in group["params"]:
        if parameter.ndim != 2:
            shape = tuple(parameter.shape)
            raise ValueError(f"Muon is for matrices, not for a parameter of shape {shape}")
        if parameter.shape[0] % group["num_pieces"]:
            raise ValueError(
                f"{parameter.shape[0]} rows do not divide into {group['num_pieces']} pieces"
            )
