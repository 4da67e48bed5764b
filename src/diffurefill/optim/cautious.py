"""Caution: an update moves only what the present gradient would move the same way.

Per parameter, with u the update of any optimiser and g the gradient: mask = 1[u g < 0] (u is added
to the weight, so agreement means opposite signs), u <- u mask / max(mean(mask), 1e-3). Weight decay
is untouched (arXiv:2411.16085; spec algorithms 3.4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LEAST_MEAN = 1e-3


def cautious_update(update: Tensor, grad: Tensor) -> Tensor:
    """`update`, in place: 0 where it goes up the slope of `grad`, the rest scaled to make up."""
    mask = (update * grad).lt_(0.0)  # 0 and 1 in the update's dtype
    return update.mul_(mask).div_(mask.mean().clamp_(min=LEAST_MEAN))


class Cautious:
    """Caution around an optimiser whose update does not depend on the weight but for the decay
    `weight -= lr * weight_decay * weight` (AdamW, fused or not, and Muon).

    The weights are set to 0 for the inner step, which then leaves the bare update in their place,
    free of the rounding of a difference. Costs one copy of the weights during a step, and keeps no
    state of its own: a state dict is the inner optimiser's.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        return self.inner.state

    @torch.no_grad()
    def step(self) -> None:
        moved = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        before = [parameter.clone() for parameter, _ in moved]
        for parameter, _ in moved:
            parameter.zero_()
        try:
            self.inner.step()
        except BaseException:
            for (parameter, _), weight in zip(moved, before, strict=True):
                parameter.copy_(weight)
            raise
        for (parameter, group), weight in zip(moved, before, strict=True):
            cautious_update(parameter, parameter.grad)
            parameter.add_(weight, alpha=1.0 - group["lr"] * group["weight_decay"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
