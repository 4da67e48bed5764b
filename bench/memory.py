"""Peak memory of a training step, predicted and measured, at several micro-batches.

    python bench/memory.py [--quick] [--preset stand-38m] [--rows 1 2 4 8] [--device cpu]

Every micro-batch has a process of its own: two micro-batches make a step; the first step makes the
moments, the second is measured. On a CPU by what torch's allocator was asked for (the profiler's
memory events), on CUDA by torch.cuda.max_memory_allocated. The prediction is `doctor --preset`'s,
for as many masked positions as the larger micro-batch had. `--quick` takes the demo's model.

    error   predicted over measured, minus 1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from _common import report
from diffurefill.config import RunConfig, load_preset
from diffurefill.data.packing import PackingCounts, Position, Rows
from diffurefill.model.denoiser import Denoiser
from diffurefill.optim.adamw import build_optimizer
from diffurefill.runtime import philox, set_threads
from diffurefill.train.live_bytes import measured_peak
from diffurefill.train.memory import arithmetic_on, predict
from diffurefill.train.step import StepResult, train_step

DOCUMENTS_PER_ROW = 4


def preset_of(name: str, rows: int, budget: float) -> RunConfig:
    config = load_preset(name)
    train = replace(
        config.train, batch_rows=2 * rows, micro_batch_rows=rows, activation_budget=budget
    )
    return replace(config, train=train)


def make_rows(config: RunConfig) -> Rows:
    B, T = config.train.batch_rows, config.data.row_length
    rng = philox("memory bench", B)
    cuts = np.sort(rng.integers(1, T, (B, DOCUMENTS_PER_ROW - 1)), axis=1)
    doc_ids = (np.arange(T) >= cuts[:, :, None]).sum(1).astype(np.int32)
    ids = rng.integers(1, config.model.vocab_size - 2, (B, T))
    lengths = np.full(B, T, dtype=np.int32)
    return Rows(ids, doc_ids, np.zeros_like(doc_ids), lengths, Position(), PackingCounts())


def measure(config: RunConfig, device: torch.device) -> dict[str, float]:
    model = Denoiser(config.model).to(device)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer, rows = build_optimizer(model, config.optim), make_rows(config)
    results: list[StepResult] = []

    def step(number: int) -> Callable[[], None]:
        keys = [(0, "mask", number, row) for row in range(config.train.batch_rows)]
        mask_id = config.model.vocab_size - 1
        return lambda: results.append(
            train_step(
                model, optimizer, rows, config, step=number, keys=keys, mask_id=mask_id, bos_id=0
            )
        )

    step(1)()
    held = sum(t.nbytes for t in model.parameters())
    for part in optimizer.parts.values():
        held += sum(t.nbytes for state in part.state.values() for t in state.values())
    peak = held + measured_peak(step(2), device)
    masked = results[-1].corrupted.is_masked.split(config.train.micro_batch_rows)
    share = max(part.float().mean().item() for part in masked)
    how = arithmetic_on(device.type, config)
    predicted = predict(config, how, config.train.micro_batch_rows, share)
    return {
        "rows": config.train.micro_batch_rows,
        "masked_share": round(share, 4),
        "predicted_bytes": predicted.total,
        "measured_bytes": peak,
        "error": round(predicted.total / peak - 1, 4),
        "predicted": predicted.bytes_by_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the demo's model, 2 and 8 rows")
    parser.add_argument("--preset", default="stand-38m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--budget", type=float, default=1.0, help="train.activation_budget")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_threads(1)
    preset, sizes = arguments.preset, arguments.rows
    if arguments.quick:
        preset, sizes = "demo", [2, 8]
    if arguments.one:
        config = preset_of(preset, sizes[0], arguments.budget)
        print(json.dumps(measure(config, torch.device(arguments.device))))
        return
    cases = []
    for rows in sizes:
        command = [sys.executable, __file__, "--one", "--preset", preset, "--rows", str(rows)]
        command += ["--device", arguments.device, "--budget", str(arguments.budget)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        cases.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{rows} rows: {cases[-1]['error']:+.1%}", file=sys.stderr)
    config = load_preset(preset)
    how = arithmetic_on(arguments.device, config)
    figures = {
        "preset": preset,
        "device_type": arguments.device,
        "activation_budget": arguments.budget,
        "row_length": config.data.row_length,
        "optimizer": config.optim.optimizer,
        "precision": str(how.dtype or torch.float32).removeprefix("torch."),
        "largest_error": max(abs(case["error"]) for case in cases),
        "cases": cases,
    }
    report("memory", figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
