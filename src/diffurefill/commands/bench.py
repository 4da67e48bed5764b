"""`diffurefill bench train`: how fast a preset trains here, how near to the peak, and where the
time goes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from diffurefill.commands.common import progress, resolved, say
from diffurefill.config import RunConfig, UserError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from diffurefill.data.documents import Corpus
    from diffurefill.data.tokens.tokenizer import Tokenizer
    from diffurefill.train.loop import Trainer

WARMUP_STEPS = 2
"""Compilers, allocators and the loader's first documents stay out of the figures."""
SHARE_STEPS = 3


@dataclass
class BenchTrain:
    """Tokens a second, MFU by 6ND and by exact FLOPs, and the share of a step by part."""

    preset: str = "demo"
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Paths of the only source: short for a [[data.sources]] section."""
    device: str | None = None
    """cpu, cuda, cuda:1 ...; the one that training takes by default."""
    steps: int = 10
    """Steps to time, after two that are not."""
    seconds: float = 30.0
    """Begin no further step after so long."""
    threads: int | None = None
    json: bool = False
    """Print one JSON object instead of the table."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.runtime import set_threads

        if self.steps < 1:
            raise UserError("--steps must be at least 1")
        set_threads(self.threads)
        config = resolved(self.settings, self.data, quietly=True)
        figures = {"preset": self.preset, **bench_train(config, self)}
        if self.json:
            say(json.dumps(figures))
            return 0
        from rich.console import Console

        Console().print(table(figures))
        return 0


def bench_train(config: RunConfig, options: BenchTrain) -> dict[str, Any]:
    """The figures, from real rows through the real loader and the step that training takes."""
    from diffurefill.train.timing import is_compiled, timed_parts, wait_for

    trainer, corpus = open_trainer(config, options.device)
    device = trainer.device
    try:
        progress("warming up")
        for _ in range(WARMUP_STEPS):
            trainer.take_step()
        wait_for(device)
        timed = time_steps(trainer, options.steps, options.seconds)
        # Apart from the timed steps: on a GPU, finding shares costs speed.
        with timed_parts(trainer.model, trainer.optimizer, device) as parts:
            for done in range(min(SHARE_STEPS, options.steps)):
                progress(f"finding shares, step {done + 1}")
                trainer.take_step()
    finally:
        trainer.close()
    step_seconds = timed["seconds"] / timed["steps"]
    data_seconds = seconds_of_data(config, corpus, trainer.tokenizer)
    progress("")
    return {
        **speed_figures(config, device, timed),
        "backends": dict(parts.backends),
        "compiled_blocks": is_compiled(trainer.model),
        "shares": {part: round(share, 4) for part, share in parts.shares().items()},
        "data_share": round(data_seconds / step_seconds, 4),
        "memory_mb": peak_memory_mb(device),
        "batch_rows": config.train.batch_rows,
        "micro_batch_rows": config.train.micro_batch_rows,
        "row_length": config.data.row_length,
        "optimizer": config.optim.optimizer,
    }


def open_trainer(config: RunConfig, device: str | None) -> tuple[Trainer, Corpus]:
    """A trainer at step 0 with the run's first weights, and its text."""
    from diffurefill.data.documents import open_corpus
    from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer

    chosen = None if device is None else require_device(device)
    progress("opening the text")
    corpus = open_corpus(config.data)
    tokenizer = make_tokenizer(config, corpus)
    trainer = Trainer(config, corpus, tokenizer, slot=0, interval_steps=config.fleet.local_steps)
    if chosen is not None and chosen != trainer.device:
        trainer.device = chosen
        trainer.model.to(chosen)
        trainer.reset_optimizer()
    # Not zeros: a card that multiplies zeros draws less power and clocks higher.
    trainer.load_weights(initial_weights(config), step=0)
    trainer.seek(None)
    return trainer, corpus


def require_device(name: str) -> torch.device:
    """UserError for a device that torch does not know or this machine does not have."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"no device {name!r}: say cpu, cuda or cuda:0") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UserError(f"training runs on cpu and cuda, not on {name!r}")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= found:
        raise UserError(f"no device {name!r} here: torch finds {found} CUDA devices, say cpu")
    return device


def time_steps(trainer: Trainer, steps: int, seconds: float) -> dict[str, Any]:
    """What so many steps, or those begun within `seconds`, did and how long they took in all.

    The device is waited for at the end alone: between two steps a GPU still computes.
    """
    from diffurefill.train.flops import visible_pairs
    from diffurefill.train.timing import rows_read, wait_for

    results = []
    began = time.perf_counter()
    with rows_read() as batches:
        while len(results) < steps and (not results or time.perf_counter() - began < seconds):
            progress(f"step {len(results) + 1}/{steps}")
            results.append(trainer.take_step())
        wait_for(trainer.device)
    taken = time.perf_counter() - began
    causal = trainer.config.model.causal
    return {
        "steps": len(results),
        "seconds": taken,
        "tokens": sum(result.num_tokens for result in results),
        "positions": sum(batch.ids.size for batch in batches),
        "masked": sum(result.num_masked for result in results),
        "pairs": sum(visible_pairs(batch.doc_ids, causal=causal) for batch in batches),
    }


def speed_figures(config: RunConfig, device: torch.device, timed: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second and MFU by both counts; tokens are real ones, padding aside."""
    import torch

    from diffurefill.model.denoiser import num_parameters
    from diffurefill.runtime import training_dtype
    from diffurefill.train.flops import device_peak, six_nd, step_flops, utilisation

    dtype = training_dtype(device, config.train.precision) or torch.float32
    tokens = timed["tokens"]
    counts = {"num_tokens": tokens, "num_masked": timed["masked"], "num_pairs": timed["pairs"]}
    exact = step_flops(config.model, **counts).per(tokens)
    peak, speed = device_peak(device, dtype), tokens / timed["seconds"]
    by_rule = six_nd(config.model)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "precision": str(dtype).removeprefix("torch."),
        "parameters": num_parameters(config.model),
        "tokens_per_second": round(speed, 1),
        "step_seconds": round(timed["seconds"] / timed["steps"], 5),
        "steps": timed["steps"],
        "gflops_per_token_6nd": by_rule / 1e9,
        "gflops_per_token_exact": exact.training / 1e9,
        "mfu_6nd": round(utilisation(by_rule, speed, peak), 4),
        "mfu_exact": round(utilisation(exact.training, speed, peak), 4),
        "peak_flops": peak.flops,
        "peak": peak.what,
        "masked_share": round(timed["masked"] / max(tokens, 1), 4),
        "visible_keys": round(timed["pairs"] / max(tokens, 1), 1),
        "padding_share": round(1 - tokens / timed["positions"], 4),
    }


def seconds_of_data(config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """What a batch of rows costs the thread that makes it, by itself."""
    from statistics import median

    from diffurefill.data.loader import Loader

    interval_rows = config.fleet.local_steps * config.train.batch_rows
    seconds = []
    with Loader(
        corpus,
        tokenizer,
        data=config.data,
        seed=config.seed,
        slot=0,
        interval_rows=interval_rows,
        batch_rows=config.train.batch_rows,
        prefetch=0,
    ) as loader:
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
        "attention (micro-batches)": backends,
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
