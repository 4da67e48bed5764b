"""What an optimiser step costs beside forward and backward: batched Muon, torch's Muon, AdamW.

    python bench/optimizer.py [--quick] [--tokens 2048] [--repeats 5] [--threads 1]

The model of the preset stand-38m, 2,048 tokens in rows of 512, half of them masked, head at the
masked ones alone. In every repeat each arm takes one step on the gradients just computed; figures
are medians of CPU seconds over the repeats, shares are of forward + backward in the same run, in
the `precision` that training takes on this CPU; `muon_share_of_fp32` is of those in fp32.

    muon            ours: Muon for the block matrices, fused AdamW for the rest
    muon_batched    the same by products alone, every shape in one batch, as on a GPU
    muon_float32, muon_bfloat16    in this arithmetic, whatever the CPU has
    torch_muon      torch.optim.Muon, for the same matrices cut apart beforehand; AdamW as above
    muon_cautious, adamw_cautious    with the cautious mask
    adamw_fused, adamw_foreach       AdamW for all
    clip            clip_grad_norm_ alone: what one pass over the gradients could save

`muon_alone` and `torch_muon_alone` leave the AdamW part out. --quick takes two blocks and 512
tokens, and its shares say nothing of the whole model's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from _common import on_this_cpu, report
from diffurefill.commands.bench.optimizer import (
    LR,
    block_matrices,
    foreach_adamw,
    our_step,
    torch_muon,
    torch_muon_alone,
)
from diffurefill.config import ModelConfig, OptimConfig, load_preset
from diffurefill.model.denoiser import Denoiser
from diffurefill.objective.loss import masked_cross_entropy
from diffurefill.optim import newton_schulz
from diffurefill.optim.adamw import muon_groups
from diffurefill.optim.muon import Muon
from diffurefill.runtime import set_threads, training_dtype

ROW_LENGTH = 512

Step = Callable[[], object]


def build_model(config: ModelConfig) -> Denoiser:
    model = Denoiser(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def forward_backward(
    model: Denoiser, num_tokens: int, seed: int, dtype: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens // ROW_LENGTH, ROW_LENGTH)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    at = torch.rand(shape, generator=generator) < 0.5
    model.zero_grad()
    targets = ids[at]
    weights = torch.full((len(targets),), 1.0 / len(targets))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        logits = model(ids, None, at).float()
    loss, _ = masked_cross_entropy(logits, targets, weights)
    loss.backward()


class Arm:
    """An optimiser over copies of the model's parameters, so that no arm moves another's."""

    def __init__(
        self,
        model: Denoiser,
        make: Callable[[Denoiser], Step | None],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = build_model(model.config)
        self._step, self._around = make(self.model), around

    def take_gradients(self, model: Denoiser) -> None:
        for own, other in zip(self.model.parameters(), model.parameters(), strict=True):
            assert other.grad is not None
            own.grad = other.grad.clone()

    def run(self) -> None:
        with self._around():
            assert self._step is not None
            self._step()


def ours(**changes: Any) -> Callable[[Denoiser], Step]:
    return lambda model: our_step(model, OptimConfig(**changes))


def muon_alone(model: Denoiser) -> Step:
    groups = muon_groups(block_matrices(model))
    return Muon(groups, lr=LR, adjust_lr_fn="match_rms_adamw").step


def clip(model: Denoiser) -> Step:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def batched() -> AbstractContextManager[object]:
    return mock.patch.object(newton_schulz, "LARGE_FROM", 10**9)


def arms_of(model: Denoiser) -> dict[str, Arm]:
    arms = {
        "muon": Arm(model, ours(optimizer="muon")),
        "muon_batched": Arm(model, ours(optimizer="muon"), batched),
        "muon_float32": Arm(model, ours(optimizer="muon", muon_dtype="float32")),
        "muon_bfloat16": Arm(model, ours(optimizer="muon", muon_dtype="bfloat16")),
        "muon_alone": Arm(model, muon_alone),
        "muon_cautious": Arm(model, ours(optimizer="muon", cautious=True)),
        "adamw_fused": Arm(model, ours()),
        "adamw_foreach": Arm(model, foreach_adamw),
        "adamw_cautious": Arm(model, ours(cautious=True)),
        "clip": Arm(model, clip),
    }
    if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
        arms["torch_muon"] = Arm(model, torch_muon)
        arms["torch_muon_alone"] = Arm(model, torch_muon_alone)
    return arms


def cpu_seconds(run: Step) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(config: ModelConfig, num_tokens: int, num_repeats: int) -> dict[str, Any]:
    model = build_model(config)
    arms = arms_of(model)
    dtype = training_dtype(torch.device("cpu"), "auto")
    passes = {"forward_backward_fp32": None, "forward_backward": dtype}
    times: dict[str, list[float]] = {name: [] for name in (*passes, *arms)}
    for repeat in range(num_repeats + 1):  # the first warms up: states, buffers, threads
        for name, precision in passes.items():
            run = partial(forward_backward, model, num_tokens, repeat, precision)
            times[name].append(cpu_seconds(run))
        for name, arm in arms.items():
            arm.take_gradients(model)
            times[name].append(cpu_seconds(arm.run))
    medians = {name: median(values[1:]) for name, values in times.items()}
    whole = medians["forward_backward"]
    shares = {f"{name}_share": round(medians[name] / whole, 4) for name in arms}
    shares["muon_share_of_fp32"] = round(medians["muon"] / medians["forward_backward_fp32"], 4)
    figures: dict[str, Any] = {**shares, "precision": "bf16" if dtype else "fp32"}
    figures |= {"cpu_seconds": {name: round(s, 4) for name, s in medians.items()}}
    if "torch_muon" in medians:
        figures["vs_torch_muon"] = round(medians["torch_muon"] / medians["muon"], 2)
        figures["alone_vs_torch_muon"] = round(
            medians["torch_muon_alone"] / medians["muon_alone"], 2
        )
    figures["max_difference"] = largest_difference(arms)
    return figures


def largest_difference(arms: dict[str, Arm]) -> float:
    """Between the block matrices of `muon` and `muon_batched`, over the largest movement."""
    start = block_matrices(build_model(arms["muon"].model.config))
    ends = [block_matrices(arms[name].model) for name in ("muon", "muon_batched")]
    worst = 0.0
    for (_, first), (_, one), (_, other) in zip(start, *ends, strict=True):
        worst = max(worst, _ratio(one - other, other - first))
    return worst


def _ratio(difference: Tensor, movement: Tensor) -> float:
    return (difference.abs().max() / movement.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two blocks, 512 tokens, two repeats")
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 512")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    config, num_tokens, repeats = (
        load_preset("stand-38m").model,
        arguments.tokens,
        arguments.repeats,
    )
    if arguments.quick:
        config, num_tokens, repeats = replace(config, layers=2), ROW_LENGTH, 2
    figures = {
        "tokens": num_tokens,
        "layers": config.layers,
        "width": config.width,
        "repeats": repeats,
        **measure(config, num_tokens, repeats),
    }
    report(on_this_cpu("optimizer"), figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
