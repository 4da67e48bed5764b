"""`diffurefill bench optimizer`: an optimiser step beside forward and backward of a preset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from diffurefill.commands.bench.shared import (
    Bench,
    Call,
    by_turns,
    open_loader,
    open_trainer,
    require_repeats,
)
from diffurefill.commands.common import progress
from diffurefill.config import OptimConfig, RunConfig

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from torch import nn

    from diffurefill.data.packing import Rows
    from diffurefill.model.denoiser import Denoiser
    from diffurefill.objective.corruption import Corrupted
    from diffurefill.train.loop import Trainer

LR = 1e-3
OURS: dict[str, dict[str, Any]] = {
    "AdamW, fused": {"optimizer": "adamw"},
    "AdamW, cautious": {"optimizer": "adamw", "cautious": True},
    "Muon": {"optimizer": "muon"},
    "Muon, cautious": {"optimizer": "muon", "cautious": True},
}
"""What a run may ask for, by its [optim] settings. Muon leaves embedding and gains to AdamW."""
FORWARD_BACKWARD = "forward and backward"


@dataclass(kw_only=True)
class BenchOptimizer(Bench):
    """An optimiser step, ours and torch's, beside forward and backward of one micro-batch."""

    repeats: int = 5
    """Timed runs; the median counts."""

    def measure(self, config: RunConfig, device: torch.device) -> dict[str, Any]:
        require_repeats(self.repeats)
        return bench_optimizer(config, device, self.repeats)

    def table(self, figures: dict[str, Any]) -> Table:
        return table(figures)


def bench_optimizer(config: RunConfig, device: torch.device, repeats: int) -> dict[str, Any]:
    """One arm at a time has its state in memory: a card that trains the preset has the room."""
    import torch

    from diffurefill.model.denoiser import num_parameters
    from diffurefill.runtime import device_name
    from diffurefill.train.gradients import arithmetic_of

    trainer, corpus = open_trainer(config, device)
    try:
        trainer.take_step()  # which decides on blocks, attention and rows at once
    finally:
        trainer.close()
    trainer.reset_optimizer()  # its moments are gone before an arm has its own
    model, how = trainer.model, trainer.how()
    with open_loader(config, corpus, trainer.tokenizer) as loader:
        micro_batch = micro_batch_of(trainer, next(loader))
    micro_batch()
    seconds = {FORWARD_BACKWARD: by_turns({"": micro_batch}, device, repeats)[""]}
    for name, build in arms(config.optim).items():
        progress(name)
        step = build(model)
        if step is not None:
            seconds[name] = by_turns({name: step}, device, repeats)[name]
    rows, length = how["rows_at_once"], config.data.row_length
    dtype = arithmetic_of(device, config.train).dtype or torch.float32
    whole = seconds[FORWARD_BACKWARD]
    per_step = whole * config.train.batch_rows / rows
    return {
        "device": device_name(device),
        "precision": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "parameters": num_parameters(config.model),
        "blocks": how["blocks"],
        "tokens": rows * length,
        "micro_batches": round(config.train.batch_rows / rows, 3),
        "ms": {name: round(1000 * s, 3) for name, s in seconds.items()},
        "share_of_micro_batch": {n: round(s / whole, 4) for n, s in seconds.items()},
        "share_of_step": {n: round(s / per_step, 4) for n, s in seconds.items()},
        "repeats": repeats,
    }


def micro_batch_of(trainer: Trainer, rows: Rows) -> Call:
    """Forward and backward of the first micro-batch of a step's `rows`, as training masks them."""
    import torch

    from diffurefill.objective.loss import token_weights
    from diffurefill.train.gradients import accumulate, arithmetic_of

    model, config, at_once = trainer.model, trainer.config, trainer.at_once.rows
    how, masked = arithmetic_of(trainer.device, config.train), corrupted(trainer, rows)
    weights = token_weights(
        masked.is_masked, masked.parts, masked.t, masked.num_eligible, config.objective.loss
    )
    doc_ids = torch.from_numpy(rows.doc_ids[:at_once])

    def run() -> None:
        model.zero_grad()
        accumulate(model, how, masked, doc_ids, weights, at_once)

    return run


def corrupted(trainer: Trainer, rows: Rows) -> Corrupted:
    """`rows` as the first step masks them, self-repair aside."""
    from diffurefill.objective.corruption import corrupt
    from diffurefill.objective.next_token import next_token

    config, tokenizer = trainer.config, trainer.tokenizer
    if config.model.causal:
        return next_token(rows)
    keys = [(config.seed, "mask", 1, trainer.slot, row) for row in range(len(rows.ids))]
    return corrupt(
        rows, config.objective, keys=keys, mask_id=tokenizer.mask_id, bos_id=tokenizer.bos_id
    )


def arms(optim: OptimConfig) -> dict[str, Callable[[Denoiser], Call | None]]:
    """Optimisers by name: a model with gradients -> one step, None where this torch lacks it."""
    ours = {
        name: lambda model, changes=changes: our_step(model, replace(optim, **changes))
        for name, changes in OURS.items()
    }
    return {**ours, "AdamW, foreach": foreach_adamw, "torch.optim.Muon": torch_muon}


def our_step(model: Denoiser, optim: OptimConfig) -> Call:
    from diffurefill.optim.adamw import build_optimizer

    optimizer = build_optimizer(model, optim)
    optimizer.set_learning_rate(LR)
    return optimizer.step


def foreach_adamw(model: Denoiser) -> Call:
    import torch

    from diffurefill.optim.adamw import adamw_groups

    groups = adamw_groups(list(model.named_parameters()), 0.1)
    return torch.optim.AdamW(groups, lr=LR, foreach=True).step


def torch_muon(model: Denoiser) -> Call | None:
    """torch's Muon for the block matrices and AdamW for the rest; None before torch 2.9."""
    import torch

    from diffurefill.optim.adamw import adamw_groups, is_block_matrix

    if not hasattr(torch.optim, "Muon"):
        return None
    muon = torch_muon_alone(model)
    others = [(name, p) for name, p in model.named_parameters() if not is_block_matrix(name, p)]
    adamw = torch.optim.AdamW(adamw_groups(others, 0.1), lr=LR, fused=True)

    def step() -> None:
        muon()
        adamw.step()

    return step


def torch_muon_alone(model: Denoiser) -> Call:
    """torch's Muon knows no stacked matrices: it gets views of them, each with its gradient."""
    import torch
    from torch import nn

    from diffurefill.optim.adamw import muon_groups

    groups = muon_groups(block_matrices(model))
    whole = [(p, group["num_pieces"]) for group in groups for p in group["params"]]
    pieces = [[nn.Parameter(view) for view in p.detach().chunk(n)] for p, n in whole]
    muon = torch.optim.Muon(
        [piece for cut in pieces for piece in cut], lr=LR, adjust_lr_fn="match_rms_adamw"
    )

    def step() -> None:
        for (parameter, n), cut in zip(whole, pieces, strict=True):
            assert parameter.grad is not None
            for piece, grad in zip(cut, parameter.grad.chunk(n), strict=True):
                piece.grad = grad
        muon.step()

    return step


def block_matrices(model: Denoiser) -> list[tuple[str, nn.Parameter]]:
    from diffurefill.optim.adamw import is_block_matrix

    return [(name, p) for name, p in model.named_parameters() if is_block_matrix(name, p)]


def table(figures: dict[str, Any]) -> Table:
    from rich.table import Table

    shown = Table(
        title=f"optimisers of {figures['preset']}: {figures['parameters']:,} parameters",
        caption=f"{figures['device']}, {figures['precision']}, {figures['blocks']} blocks; "
        f"a micro-batch has {figures['tokens']:,} tokens, a step {figures['micro_batches']:g} "
        "micro-batches. "
        "Muon: for the block matrices, AdamW for the rest",
        box=None,
    )
    for column in ("", "time", "of a micro-batch", "of a step's"):
        shown.add_column(column, justify="right" if column else "left")
    for name, ms in figures["ms"].items():
        shown.add_row(
            name,
            f"{ms:,.1f} ms",
            f"{figures['share_of_micro_batch'][name]:.1%}",
            f"{figures['share_of_step'][name]:.1%}",
        )
    return shown
