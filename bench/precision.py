"""What training in bf16 changes on this CPU: held-out CE at the same steps, and the time of a step.

    python bench/precision.py [--quick] [--steps N] [--seeds N]

The preset stand-micro on the text of the Python library, one thread: the same seeds, rows and masks
in fp32 and under bf16 autocast, taken in turns. Held-out CE is measured in fp32, in nats per masked
token, `difference` is bf16 less fp32 of the same seed. (full: 400 steps of 16 rows, 3 seeds;
--quick: 6 steps, one seed.) A seed's own spread says how large a difference has to be to matter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from _common import report
from diffurefill.config import RunConfig, load_preset
from diffurefill.data.documents import open_corpus
from diffurefill.evaluate.probe_sets import build_probe
from diffurefill.evaluate.probes import held_out_ce
from diffurefill.runtime import has_bf16, set_threads
from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer

PRECISIONS = ("fp32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="6 steps, one seed; writes no result")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    set_threads(1)
    steps, seeds = (6, 1) if options.quick else (options.steps, options.seeds)
    runs: dict[str, list[dict[str, float]]] = {precision: [] for precision in PRECISIONS}
    for seed in range(seeds):
        for precision in PRECISIONS:
            runs[precision].append(train(configured(precision, seed, steps), steps))
            print(f"seed {seed} {precision}: {runs[precision][-1]}", file=sys.stderr)
    figures = compared(runs)
    report("precision", {**figures, "steps": steps, "seeds": seeds, "runs": runs},
           quick=options.quick)  # fmt: skip


def configured(precision: Any, seed: int, steps: int) -> RunConfig:
    config = load_preset("stand-micro")
    return replace(
        config,
        seed=seed,
        optim=replace(config.optim, total_steps=steps, warmup_steps=min(40, steps // 2)),
        train=replace(config.train, precision=precision, batch_rows=16, micro_batch_rows=16),
    )


def train(config: RunConfig, steps: int) -> dict[str, float]:
    corpus = open_corpus(config.data)
    tokenizer = make_tokenizer(config, corpus)
    probe = build_probe(config, corpus, tokenizer)
    trainer = Trainer(config, corpus, tokenizer, slot=0, interval_steps=steps)
    trainer.load_weights(initial_weights(config), step=0)
    trainer.seek(None)
    began = time.process_time()
    num_tokens = sum(trainer.take_step().num_tokens for _ in range(steps))
    seconds = time.process_time() - began
    trainer.close()
    ce = held_out_ce(trainer.model, probe, mask_id=tokenizer.mask_id, device=trainer.device)
    return {"held_out_ce": round(ce.mean, 4), "tokens_per_cpu_second": round(num_tokens / seconds)}


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    fp32, bf16 = (runs[precision] for precision in PRECISIONS)
    differences = [
        round(b["held_out_ce"] - a["held_out_ce"], 4) for a, b in zip(fp32, bf16, strict=True)
    ]
    speeds = [statistics.median(r["tokens_per_cpu_second"] for r in one) for one in (fp32, bf16)]
    ces = [run["held_out_ce"] for run in fp32]
    return {
        "difference": round(statistics.mean(differences), 4),
        "differences": differences,
        "spread_of_seeds": round(max(ces) - min(ces), 4),
        "bf16_over_fp32_speed": round(speeds[1] / speeds[0], 3),
        "cpu_has_bf16": has_bf16(torch.device("cpu")),
    }


if __name__ == "__main__":
    main()
