"""Parameter groups, and the optimiser of a run: AdamW alone, or Muon for the block matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from diffurefill.config import OptimConfig, UserError
from diffurefill.optim.cautious import Cautious
from diffurefill.optim.loss_scale import LossScale
from diffurefill.optim.muon import Muon

FUSED_PIECES = {"qkv.weight": 3, "gate_up.weight": 2}
"""Matrices that hold several stacked along their rows: Muon orthogonalises each by itself."""

ADJUST_LR = {"rms": "match_rms_adamw", "original": "original"}
"""optim.muon_scale in the words of torch.optim.Muon."""

_LOSS_SCALE = "loss_scale"
Named = list[tuple[str, nn.Parameter]]
Part = torch.optim.Optimizer | Cautious


class RunOptimizer:
    """The torch optimisers of a run behind one face: one schedule, one state."""

    def __init__(self, parts: Mapping[str, Part], lr_ratios: Mapping[str, float]) -> None:
        self.parts = parts
        self.loss_scale: LossScale | None = None
        """Set by the first step in float16, and part of the state from then on."""
        self._lr_ratios = lr_ratios

    def set_learning_rate(self, lr: float) -> None:
        """Set the schedule's rate; each part takes its ratio of it. Call before every `step`."""
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["lr"] = lr * self._lr_ratios[name]

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        if self.loss_scale is not None:
            state[_LOSS_SCALE] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError when `state` was saved by another optimiser or for another model."""
        # A state may come from a machine with another precision: a factor is no reason to refuse.
        scale = state.get(_LOSS_SCALE)
        state = {name: part for name, part in state.items() if name != _LOSS_SCALE}
        if state.keys() != self.parts.keys():
            raise UserError(
                f"the optimiser state is of {' and '.join(state)}, this run uses "
                f"{' and '.join(self.parts)}: set optim.optimizer as it was, or drop the state"
            )
        for name, part in self.parts.items():
            if not _fits(part, state[name]):
                raise UserError(
                    f"the {name} state is of another model: use the [model] section it was saved "
                    "with, or drop the state"
                )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.loss_scale = LossScale(**scale) if scale else None


def build_optimizer(model: nn.Module, config: OptimConfig) -> RunOptimizer:
    """The optimiser `config` names, with learning rate 0 until `set_learning_rate`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wrap = Cautious if config.cautious else _bare
    if config.optimizer == "adamw":
        return RunOptimizer({"adamw": wrap(_adamw(named, config))}, {"adamw": 1.0})
    matrices = [(name, p) for name, p in named if is_block_matrix(name, p)]
    others = [(name, p) for name, p in named if not is_block_matrix(name, p)]
    muon = Muon(
        muon_groups(matrices),
        lr=0.0,
        weight_decay=config.weight_decay,
        adjust_lr_fn=ADJUST_LR[config.muon_scale],
        ns_dtype=config.muon_dtype,
    )
    parts = {"muon": wrap(muon), "adamw": wrap(_adamw(others, config))}
    return RunOptimizer(parts, {"muon": config.muon_lr_ratio, "adamw": 1.0})


def is_block_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon's share: hidden matrices. The embedding, which is also the head, stays with AdamW."""
    return name.startswith("blocks.") and parameter.ndim == 2


def muon_groups(matrices: Named) -> list[dict[str, Any]]:
    """Groups by the number of matrices that a parameter holds."""
    pieces: dict[int, list[nn.Parameter]] = {}
    for name, parameter in matrices:
        suffix = ".".join(name.split(".")[-2:])
        pieces.setdefault(FUSED_PIECES.get(suffix, 1), []).append(parameter)
    return [{"params": params, "num_pieces": n} for n, params in sorted(pieces.items())]


def adamw_groups(named: Named, weight_decay: float) -> list[dict[str, Any]]:
    """Decay for matrices, the tied embedding included; none on gains (spec algorithms 3.1)."""
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def _adamw(named: Named, config: OptimConfig) -> torch.optim.AdamW:
    groups = adamw_groups(named, config.weight_decay)
    # fused: a third of the time of the loop over tensors on CPU too (spec performance 2).
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)


def _bare(optimizer: torch.optim.Optimizer) -> Part:
    return optimizer


def _fits(part: Part, state: dict[str, Any]) -> bool:
    """Same groups and same shapes; torch itself compares only how many parameters there are."""
    own_groups = part.state_dict()["param_groups"]
    if [g["params"] for g in own_groups] != [g["params"] for g in state["param_groups"]]:
        return False
    parameters = [p for group in part.param_groups for p in group["params"]]
    return all(
        value.shape == parameters[index].shape
        for index, entry in state["state"].items()
        for value in entry.values()
        if value.ndim > 0  # AdamW's step count is a scalar
    )
