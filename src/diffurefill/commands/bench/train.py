"""`diffurefill bench train`: how fast a preset trains here, how near to the peak, and where the
time goes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from diffurefill.commands.bench.shared import Bench, open_loader, open_trainer
from diffurefill.commands.common import progress
from diffurefill.config import RunConfig, UserError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from diffurefill.data.documents import Corpus
    from diffurefill.data.tokens.tokenizer import Tokenizer
    from diffurefill.model.segments import Backend
    from diffurefill.train.loop import Trainer
    from diffurefill.train.speed import Work

WARMUP_STEPS = 2
"""Compilers, allocators and the loader's first documents stay out of the figures."""
SHARE_STEPS = 3


@dataclass(kw_only=True)
class BenchTrain(Bench):
    """Tokens a second, MFU by 6ND and by exact FLOPs, and the share of a step by part."""

    steps: int = 10
    """Steps to time, after two that are not."""
    seconds: float = 30.0
    """Begin no further step after so long."""
    attention: Literal["auto", "sdpa", "loop", "flex", "varlen"] = "auto"
    """The backend to take; auto: as training would."""

    def measure(self, config: RunConfig, device: torch.device) -> dict[str, Any]:
        if self.steps < 1:
            raise UserError("--steps must be at least 1")
        backend = None if self.attention == "auto" else self.attention
        return bench_train(config, device, self.steps, self.seconds, backend)

    def table(self, figures: dict[str, Any]) -> Table:
        return table(figures)


def bench_train(
    config: RunConfig, device: torch.device, steps: int, seconds: float, backend: Backend | None
) -> dict[str, Any]:
    """The figures, from real rows through the real loader and the step that training takes."""
    from diffurefill.runtime import wait_for
    from diffurefill.train.timing import is_compiled, timed_parts

    trainer, corpus = open_trainer(config, device)
    trainer.model.attention_backend = backend
    try:
        progress("warming up")
        for _ in range(WARMUP_STEPS):
            trainer.take_step()
        wait_for(device)
        work, taken = time_steps(trainer, steps, seconds)
        # Apart from the timed steps: on a GPU, finding shares costs speed.
        with timed_parts(trainer.model, trainer.optimizer, device) as parts:
            for done in range(min(SHARE_STEPS, steps)):
                progress(f"finding shares, step {done + 1}")
                trainer.take_step()
    finally:
        trainer.close()
    data_seconds = seconds_of_data(config, corpus, trainer.tokenizer)
    return {
        **speed_figures(config, device, work, taken),
        "backends": dict(parts.backends),
        "attention": trainer.how()["attention"],
        "compiled_blocks": is_compiled(trainer.model),
        "shares": {part: round(share, 4) for part, share in parts.shares().items()},
        "data_share": round(data_seconds * work.steps / taken, 4),
        "memory_mb": peak_memory_mb(device),
        "batch_rows": config.train.batch_rows,
        "micro_batch_rows": trainer.how()["rows_at_once"],
        "row_length": config.data.row_length,
        "optimizer": config.optim.optimizer,
    }


def time_steps(trainer: Trainer, steps: int, seconds: float) -> tuple[Work, float]:
    """What so many steps, or those begun within `seconds`, did, and how long they took in all.

    The device is waited for at the end alone: between two steps a GPU still computes.
    """
    from diffurefill.runtime import wait_for

    trainer.take_metrics()
    work = trainer.work
    began = time.perf_counter()
    while work.steps < steps and (not work.steps or time.perf_counter() - began < seconds):
        progress(f"step {work.steps + 1}/{steps}")
        trainer.take_step()
    wait_for(trainer.device)
    taken = time.perf_counter() - began
    trainer.take_metrics()
    return work, taken


def speed_figures(
    config: RunConfig, device: torch.device, work: Work, seconds: float
) -> dict[str, Any]:
    """Tokens a second and MFU as every log has them; tokens are real ones, padding aside."""
    import torch

    from diffurefill.model.denoiser import num_parameters
    from diffurefill.runtime import device_name, training_dtype
    from diffurefill.train.flops import six_nd
    from diffurefill.train.speed import exact_flops_per_token, speed_facts

    dtype = training_dtype(device, config.train.precision) or torch.float32
    facts, tokens = speed_facts(config, device, work, seconds), max(work.tokens, 1)
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "precision": str(dtype).removeprefix("torch."),
        "parameters": num_parameters(config.model),
        "tokens_per_second": round(facts["tokens_per_second"], 1),
        "step_seconds": round(seconds / work.steps, 5),
        "steps": work.steps,
        "gflops_per_token_6nd": six_nd(config.model) / 1e9,
        "gflops_per_token_exact": exact_flops_per_token(config, work) / 1e9,
        "mfu_6nd": round(facts["mfu_6nd"], 4),
        "mfu_exact": round(facts["mfu_exact"], 4),
        "peak_flops": facts["peak_flops"],
        "peak": facts["peak"],
        "masked_share": round(work.masked / tokens, 4),
        "visible_keys": round(work.pairs / tokens, 1),
        "padding_share": round(1 - work.tokens / work.positions, 4),
    }


def seconds_of_data(config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """What a batch of rows costs the thread that makes it, by itself."""
    from statistics import median

    seconds = []
    with open_loader(config, corpus, tokenizer) as loader:
        for _ in range(WARMUP_STEPS + SHARE_STEPS):
            began = time.perf_counter()
            next(loader)
            seconds.append(time.perf_counter() - began)
    return median(seconds[WARMUP_STEPS:])


def peak_memory_mb(device: torch.device) -> float:
    """The most that tensors held on the device, or this process in all on a CPU."""
    import resource

    import torch

    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)


def table(figures: dict[str, Any]) -> Table:
    from rich.table import Table

    shown = Table("figure", "value", box=None, title=f"training step of {figures['preset']}")
    speed, peak = f"{figures['tokens_per_second']:,.0f}", figures["peak"]
    backends = ", ".join(f"{name} ({n})" for name, n in figures["backends"].items())
    blocks = "compiled" if figures["compiled_blocks"] else "eager"
    lines = {
        "device": f"{figures['device']}, {figures['precision']}, {figures['threads']} threads",
        "model": f"{figures['parameters']:,} parameters, {blocks} blocks, {figures['optimizer']}",
        "batch": f"{figures['batch_rows']} rows of {figures['row_length']}, "
        f"{figures['micro_batch_rows']} at a time; {figures['masked_share']:.1%} masked, "
        f"{figures['visible_keys']:,.0f} keys seen, {figures['padding_share']:.1%} padding",
        "attention (micro-batches)": f"{backends}; {figures['attention']}",
        "speed": f"{speed} tokens/s, {figures['step_seconds']:.3f} s a step ({figures['steps']})",
        "MFU by 6ND": f"{figures['mfu_6nd']:.1%}, "
        f"{figures['gflops_per_token_6nd']:.4g} GFLOP/token",
        "MFU exact": f"{figures['mfu_exact']:.1%}, "
        f"{figures['gflops_per_token_exact']:.4g} GFLOP/token",
        "peak": peak,
        "memory": f"{figures['memory_mb']:,.0f} MB at most",
    }
    for name, value in lines.items():
        shown.add_row(name, value)
    for part, share in figures["shares"].items():
        shown.add_row(f"  {part}", f"{share:.1%}")
    shown.add_row("data, in its own thread", f"{figures['data_share']:.1%} of a step")
    return shown
