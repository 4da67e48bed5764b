"""Muon: momentum whose update is orthogonalised, scaled to move weights as AdamW does.

Newton-Schulz coefficients: Keller Jordan's Muon. Scale 0.2 sqrt(max(rows, cols)): Moonlight
(arXiv:2502.16982); with it AdamW's learning rate and weight decay apply unchanged.
torch.optim.Muon gives the same updates one matrix at a time and always in bf16; this one batches
matrices of equal shape, cuts fused matrices apart, and uses fp32 where bf16 is slow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from diffurefill.runtime import autocast_dtype

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5

Work = tuple[Tensor, Tensor, dict[str, Any]]
"""A parameter, its gradient and its group."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """Move the singular values of each of `matrices` (n, rows, cols) towards 1; scale-free.

    The result is near an orthogonal matrix, not one: most singular values end in [0.65, 1.2].
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(autocast_dtype(matrices.device) or torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # the Gram matrix is then the smaller one
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        # a x + (b gram + c gram^2) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For matrices only. A parameter group may name `num_pieces`: how many matrices are stacked
    along its rows (3 in a fused qkv), each orthogonalised by itself."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.0,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "num_pieces": 1,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon takes no closure"
        by_shape = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows, cols = parameter.shape
                    shape = (rows // group["num_pieces"], cols)
                    by_shape[shape].append((parameter, parameter.grad, group))
        for shape, work in by_shape.items():
            self._update(shape, work)

    def _update(self, shape: tuple[int, int], work: list[Work]) -> None:
        """One step of all parameters whose pieces have `shape`, orthogonalised in one batch."""
        directions = [
            self._direction(parameter, grad, group["momentum"]).view(-1, *shape)
            for parameter, grad, group in work
        ]
        updates = orthogonalise(torch.cat(directions)).split([len(d) for d in directions])
        scale = 0.2 * math.sqrt(max(shape))
        for (parameter, _, group), update in zip(work, updates, strict=True):
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            update = update.reshape(parameter.shape).to(parameter.dtype)
            parameter.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, parameter: Tensor, grad: Tensor, momentum: float) -> Tensor:
        """Nesterov's look ahead, after `grad` has entered the running mean."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        mean = state["momentum"].lerp_(grad, 1.0 - momentum)
        return grad.lerp(mean, momentum)
