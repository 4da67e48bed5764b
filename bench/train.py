"""The training step on CPU, beside three others and beside its own matrix products.

    python bench/train.py [--quick] [--threads N] [--torchdiff-python PATH]
                                                          (or TORCHDIFF_PYTHON=PATH)

The same width, depth, vocabulary and batch, medians of interleaved repeats, in CPU seconds of the
whole step: masks, forward, backward, clip, update. Ratios are theirs over ours. Theirs run in
processes of their own, where glibc handles memory as it does by itself (see bench/allocator.py).

ours              train.step.train_step with AdamW, in fp32; `ours_muon` with Muon; `_compiled`:
                  blocks compiled (not with --quick)
full_head         a plain eager transformer with the head on all positions, as trainers in LLaDA's
                  way compute it; fused AdamW, too
full_head_dllm    transformers' Llama with the head and the cross-entropy on all positions, as dllm
                  computes them; the same AdamW
torchdiff_*       the published package slm388-torchdiff, if PATH is a Python that has it: its own
                  step in its default mode (against ours_muon: it has Muon there) and in its plain
                  one, in bf16 as it comes; `_fp32`: without its autocast
matmul_floor      the products of our step alone, forward and backward, same shapes, no allocation

`_bf16`: ours and full heads under bf16 autocast, the floor of bf16 products; left out where this
CPU only emulates bf16, and the result file is another one. The ratios are in the precision that
`train.precision = "auto"` takes on this CPU, theirs in it too; torchdiff's as it comes.
`in_one_precision` has them in all that were taken.

Shapes: `micro` (2.56M parameters, 32 rows of 128) and, without --quick, two of 37.89M with 4 rows
of 512: `stand-38m`, and `wide-vocabulary`, which has 20,736 ids instead of 8,448 and a narrower
feed-forward part. The top-level figures are those of `micro`; `shapes` has all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from _common import on_this_cpu, report
from _other_process import steps_of
from _products import Products
from _torchdiff import default_mode_tokens, torchdiff_steps
from diffurefill.config import (
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    load_preset,
)
from diffurefill.data.packing import PackingCounts, Position, Rows
from diffurefill.model.compiling import compile_blocks
from diffurefill.model.denoiser import Denoiser, num_parameters
from diffurefill.objective.corruption import Corrupted, corrupt
from diffurefill.optim.adamw import build_optimizer
from diffurefill.runtime import has_bf16, philox, set_threads
from diffurefill.train.step import train_step

SEED = 0
SEEDS = 64
"""Masks to choose among."""
DOCUMENTS_PER_ROW = 3
BOS = 0
CACHED_SCORES = 2**18
"""Scores that matmul_floor makes at a time: 1 MB."""
CPU = torch.device("cpu")
Step = Callable[[], float]
"""Takes one step; returns its CPU seconds."""
Precision = Literal["auto", "fp32", "bf16"]
PRECISIONS: dict[str, Precision] = {"": "fp32"}
"""By the end of a step's name."""
if has_bf16(CPU):
    PRECISIONS["_bf16"] = "bf16"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FULL_HEADS = {"full_head": "llada", "full_head_dllm": "dllm"}
"""What bench/_full_head_step.py is asked for."""

DIFFERENCES = {
    "ours": "documents of a row do not see each other (3 a row); the same masks in every step, at "
    "half of the positions; theirs draw them anew, half on average",
    "full_head": "rows are one document each; loss weighted by 1 / t over all positions; "
    "projections of q, k, v, gate and up apart; freed memory goes back to the system",
    "full_head_dllm": "as full_head; the blocks are those of transformers",
    "torchdiff_plain": "rows are one document each; q and k normed; adaptive norms from a time "
    "embedding (more parameters); head on all positions; bf16 autocast, as its own step opens it "
    "on any device; `_fp32`: the same without autocast",
    "torchdiff_default": "as plain, and: of each row only the first half is read, as 20-token "
    "canvases, once clean and once masked, so that about half as many tokens are predicted; head "
    "on masked positions; Muon, a matrix at a time, and AdamW. Compared with our step with Muon",
    "torchdiff_*": "AdamW without fused=True on CPU, as its own code builds it; one of its "
    "diffusion blocks with the whole depth, for a step trains one",
}


def shape_configs() -> dict[str, RunConfig]:
    """RunConfigs by name; `batch_rows` rows in one micro-batch, t ~ U(0, 1), no clean prefix."""
    micro = ModelConfig(vocab_size=4096, width=192, layers=4, heads=3, ffn_width=512)
    preset = load_preset("stand-38m")
    wide = replace(preset.model, vocab_size=20_736, ffn_width=1536)  # spec algorithms.md 2.3, row 3
    sizes = {
        "micro": (micro, 32, 128),
        "stand-38m": (preset.model, 4, preset.data.row_length),
        "wide-vocabulary": (wide, 4, preset.data.row_length),
    }
    return {
        name: replace(
            preset,
            model=model,
            data=replace(preset.data, row_length=row_length),
            objective=ObjectiveConfig(t_min=0.0, prefix_rows=0.0),
            train=TrainConfig(batch_rows=rows, micro_batch_rows=rows),
        )
        for name, (model, rows, row_length) in sizes.items()
    }


def make_rows(config: RunConfig) -> Rows:
    """Documents of unequal lengths, every position filled."""
    B, T = config.train.batch_rows, config.data.row_length
    rng = philox("train bench", SEED)
    cuts = np.sort(rng.integers(1, T, (B, DOCUMENTS_PER_ROW - 1)), axis=1)
    doc_ids = (np.arange(T) >= cuts[:, :, None]).sum(1).astype(np.int32)
    ids = rng.integers(1, config.model.vocab_size - 2, (B, T))
    lengths = np.full(B, T, dtype=np.int32)
    return Rows(ids, doc_ids, np.zeros_like(doc_ids), lengths, Position(), PackingCounts())


def mask_keys(config: RunConfig, seed: int) -> list[tuple[int | str, ...]]:
    return [(seed, "mask", row) for row in range(config.train.batch_rows)]


def masks_of(config: RunConfig, seed: int) -> Corrupted:
    mask_id, keys = config.model.vocab_size - 1, mask_keys(config, seed)
    rows = make_rows(config)
    return corrupt(rows, config.objective, keys=keys, mask_id=mask_id, bos_id=BOS)


@cache
def half_masked(config: RunConfig) -> int:
    """Of some seeds the one whose masks are nearest to half of the positions: a step's time hangs
    on how many there are, and each of a few rows has a rate of its own."""
    shares = [float(masks_of(config, seed).is_masked.float().mean()) for seed in range(SEEDS)]
    return min(range(SEEDS), key=lambda seed: abs(shares[seed] - 0.5))


# --- ours ----------------------------------------------------------------------------------------


def our_steps(config: RunConfig, *, is_quick: bool) -> dict[str, Step]:
    steps = {}
    for end, precision in PRECISIONS.items():
        steps[f"ours{end}"] = our_step(config, "adamw", precision)
        steps[f"ours_muon{end}"] = our_step(config, "muon", precision)
        if not is_quick:
            steps[f"ours_compiled{end}"] = our_step(config, "adamw", precision, is_compiled=True)
    return steps


def our_step(
    config: RunConfig,
    optimizer_name: str,
    precision: Precision,
    *,
    is_compiled: bool = False,
) -> Step:
    optim = OptimConfig(optimizer=optimizer_name, peak_lr=((0, 1e-4),), warmup_steps=1)
    config = replace(config, optim=optim, train=replace(config.train, precision=precision))
    model = Denoiser(config.model)
    model.init_weights(torch.Generator().manual_seed(SEED))
    if is_compiled:
        compile_blocks(model)
    optimizer, rows = build_optimizer(model, config.optim), make_rows(config)
    mask_id, half = config.model.vocab_size - 1, half_masked(config)

    def step(seed: int = half) -> None:
        keys = mask_keys(config, seed)
        train_step(model, optimizer, rows, config, step=1, keys=keys, mask_id=mask_id, bos_id=BOS)

    if is_compiled:
        # Training masks another number of positions in every step: compile for any number.
        for seed in (half + 1, half + 2):
            step(seed)
    return timed(step)


def timed(step: Callable[..., object]) -> Step:
    def run() -> float:
        began = time.process_time()
        step()
        return time.process_time() - began

    return run


# --- the products alone --------------------------------------------------------------------------


def matmul_step(config: RunConfig, dtype: torch.dtype) -> Step:
    """Every product of our step once: y = x w^T, and going backward dx = dy w, dw = dy^T x."""
    model, is_masked = config.model, masks_of(config, half_masked(config)).is_masked
    B, T = is_masked.shape
    N, M = B * T, int(is_masked.sum())
    D, K = model.width, model.width // model.heads
    ffn = [(2 * model.ffn_width, D), (D, model.ffn_width)]
    products = [Products((N, D), (3 * D, D), dtype) for _ in range(model.layers)]
    rest = [N] * (model.layers - 1) + [M]
    products += [Products((n, w[1]), w, dtype) for n in rest for w in [(D, D), *ffn]]
    products += [Products((M, D), (model.vocab_size, D), dtype)]
    # q k^T, then p v with v transposed, both as x w^T; few heads at a time, so that scores stay in
    # the cache, as a fused attention keeps them.
    heads = B * model.heads
    some = next(
        n for n in range(min(heads, max(1, CACHED_SCORES // T**2)), 0, -1) if heads % n == 0
    )
    scores, mixed = ((some, T, K), (some, T, K)), ((some, T, T), (some, K, T))
    attention = [Products(*sizes, dtype) for sizes in (scores, mixed)]

    def step() -> None:
        for product in products:
            product.forward_and_backward()
        for _ in range(model.layers * heads // some):
            for product in attention:
                product.forward_and_backward()

    return timed(step)


# --- the figures ---------------------------------------------------------------------------------


def full_head_steps(shape: str, threads: int) -> AbstractContextManager[dict[str, Step]]:
    script = Path(__file__).with_name("_full_head_step.py")
    command = [sys.executable, str(script), shape, str(threads)]
    requests = {
        f"{name}{end}": f"{trainer} {precision}"
        for name, trainer in FULL_HEADS.items()
        for end, precision in PRECISIONS.items()
    }
    return steps_of(command, requests)


def measure(
    name: str, config: RunConfig, repeats: int, python: str | None, threads: int, *, is_quick: bool
) -> dict[str, Any]:
    with ExitStack() as stack:
        steps = our_steps(config, is_quick=is_quick)
        for end, precision in PRECISIONS.items():
            steps[f"matmul_floor{end}"] = matmul_step(config, DTYPES[precision])
        steps |= stack.enter_context(full_head_steps(name, threads))
        if python:
            # Emulated, its bf16 takes a minute a step of the larger shapes.
            as_it_comes = has_bf16(CPU) or name == "micro"
            steps |= stack.enter_context(
                torchdiff_steps(python, config, threads, as_it_comes=as_it_comes)
            )
        times: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + 1):
            for name, step in steps.items():
                seconds = step()
                if repeat:  # the first one warms up
                    times[name].append(seconds)
            print(f"  {repeat}/{repeats}", file=sys.stderr)
    profile = operator_shares(our_step(config, "adamw", "auto"))
    return figures(config, {n: statistics.median(t) for n, t in times.items()}, times, profile)


def figures(
    config: RunConfig,
    seconds: dict[str, float],
    times: dict[str, list[float]],
    profile: dict[str, float],
) -> dict[str, Any]:
    tokens = config.train.batch_rows * config.data.row_length

    def over(theirs: str, ours: str) -> float | None:
        pair = seconds.get(theirs), seconds.get(ours)
        return round(pair[0] / pair[1], 3) if pair[0] and pair[1] else None

    own = list(PRECISIONS)[-1]  # what `auto` takes

    def ours(precision: str) -> dict[str, float | None]:
        return {
            "vs_full_head": over(f"full_head{precision}", f"ours{precision}"),
            "vs_full_head_dllm": over(f"full_head_dllm{precision}", f"ours{precision}"),
            "over_matmul_floor": over(f"ours{precision}", f"matmul_floor{precision}"),
            # A step of nothing but its products could be no further ahead.
            "vs_full_head_at_most": over(f"full_head{precision}", f"matmul_floor{precision}"),
            "compiled_vs_full_head": over(f"full_head{precision}", f"ours_compiled{precision}"),
            "compiled_vs_full_head_dllm": over(
                f"full_head_dllm{precision}", f"ours_compiled{precision}"
            ),
            "compiled_over_matmul_floor": over(
                f"ours_compiled{precision}", f"matmul_floor{precision}"
            ),
        }

    theirs = {"": "_fp32", "_bf16": ""}  # torchdiff's in fp32, and as it comes
    return {
        "tokens_per_second": round(tokens / seconds[f"ours{own}"], 1),
        "vs_torchdiff_default": over("torchdiff_default", f"ours_muon{own}"),
        "vs_torchdiff_plain": over("torchdiff_plain", f"ours{own}"),
        **ours(own),
        "precision": PRECISIONS[own],
        "in_one_precision": {
            name: {
                **ours(end),
                "vs_torchdiff_default": over(f"torchdiff_default{theirs[end]}", f"ours_muon{end}"),
                "vs_torchdiff_plain": over(f"torchdiff_plain{theirs[end]}", f"ours{end}"),
            }
            for end, name in PRECISIONS.items()
        },
        "default_mode_tokens": default_mode_tokens(config),
        "parameters": num_parameters(config.model),
        "batch": [config.train.batch_rows, config.data.row_length],
        "masked_share": float(masks_of(config, half_masked(config)).is_masked.float().mean()),
        "cpu_seconds": {name: round(value, 4) for name, value in seconds.items()},
        "spread": {n: [round(min(t), 4), round(max(t), 4)] for n, t in times.items()},
        "operator_shares": profile,
    }


def operator_shares(step: Step, top: int = 16) -> dict[str, float]:
    """Share of our step by torch operator, the largest first; by itself, callees apart."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:top]
    return {event.key: round(event.self_cpu_time_total / total, 4) for event in largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small shape, 3 repeats")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--torchdiff-python", default=os.environ.get("TORCHDIFF_PYTHON"))
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    configs, repeats = shape_configs(), {"micro": 7, "stand-38m": 3, "wide-vocabulary": 3}
    if arguments.quick:
        configs, repeats = {"micro": configs["micro"]}, {"micro": 3}
    shapes = {}
    for name, config in configs.items():
        print(name, file=sys.stderr)
        python = arguments.torchdiff_python
        shapes[name] = measure(
            name, config, repeats[name], python, arguments.threads, is_quick=arguments.quick
        )
    keys = ("tokens_per_second", "vs_full_head", "vs_torchdiff_default", "vs_torchdiff_plain")
    top = {key: shapes["micro"][key] for key in (*keys, "over_matmul_floor", "precision")}
    found = {**top, "threads": arguments.threads, "seed": SEED, "repeats": repeats}
    found |= {"shapes": shapes, "differences": DIFFERENCES}
    report(on_this_cpu("train"), found, quick=arguments.quick)


if __name__ == "__main__":
    main()
