"""Which demo preset learns most in the CPU time a demo has: every variant gets the same seconds.

    python bench/demo_preset.py [--quick]

Trains each variant of the `demo` preset alone, one thread, for the same CPU seconds (full: 120,
--quick: 3) and scores it on the demo's probe. The schedule of each is as long as the steps it gets,
which a few timed steps tell. Held-out CE is in nats per masked token, the tokenizer is the same
for all. It decides between presets and nothing else: one seed, one machine.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from _common import report
from diffurefill.config import RunConfig, load_preset
from diffurefill.data.documents import open_corpus
from diffurefill.evaluate.probe_sets import build_probe
from diffurefill.evaluate.probes import held_out_ce
from diffurefill.runtime import set_threads
from diffurefill.toml import merge
from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer

WIDE = {"width": 192, "layers": 4, "heads": 4, "ffn_width": 512}
VARIANTS: dict[str, dict[str, Any]] = {
    "preset": {},
    "4 layers": {"model": {"layers": 4}},
    "4 layers of 192": {"model": WIDE},
    "no clean prefix": {"objective": {"prefix_rows": 0.0}},
    "t from 0": {"objective": {"t_min": 0.0}},
    "row loss": {"objective": {"loss": "row"}},
    "8 rows a step": {"train": {"batch_rows": 8}},
    "AdamW alone": {"optim": {"optimizer": "adamw"}},
}
TIMED_STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute; writes no result")
    quick = parser.parse_args().quick
    set_threads(1)
    seconds = 3.0 if quick else 120.0
    variants = {}
    for name, changes in list(VARIANTS.items())[: 3 if quick else None]:
        variants[name] = train_for(merge(load_preset("demo"), changes), seconds)
        print(name, variants[name], flush=True)
    gaps = {
        name: v["held_out_ce"] - variants["preset"]["held_out_ce"] for name, v in variants.items()
    }
    figures = {"cpu_seconds_each": seconds, "variants": variants, "ce_over_preset": gaps}
    report("demo_preset", figures, quick=quick)


def train_for(config: RunConfig, seconds: float) -> dict[str, Any]:
    corpus = open_corpus(config.data)
    tokenizer = make_tokenizer(config, corpus)
    probe = build_probe(config, corpus, tokenizer)
    trainer = Trainer(config, corpus, tokenizer, slot=0, interval_steps=config.fleet.local_steps)
    trainer.load_weights(initial_weights(config), step=0)
    trainer.seek(None)
    began = time.process_time()
    for _ in range(TIMED_STEPS):
        trainer.take_step()
    num_steps = int(TIMED_STEPS * seconds / (time.process_time() - began))
    warmup = min(config.optim.warmup_steps, num_steps // 4)
    schedule = replace(config.optim, total_steps=num_steps, warmup_steps=warmup)
    trainer.config = replace(config, optim=schedule)
    trainer.reset_optimizer()
    trainer.load_weights(initial_weights(config), step=0)
    trainer.seek(None)
    num_tokens = sum(trainer.take_step().num_tokens for _ in range(num_steps))
    trainer.close()
    ce = held_out_ce(trainer.model, probe, mask_id=tokenizer.mask_id, device=trainer.device)
    return {
        "held_out_ce": round(ce.mean, 4),
        "steps": num_steps,
        "tokens": num_tokens,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


if __name__ == "__main__":
    main()
