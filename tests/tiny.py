"""A run small enough for tests that start real processes: seconds on one core."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from diffurefill.config import (
    DataConfig,
    FleetConfig,
    ModelConfig,
    OptimConfig,
    ProbeConfig,
    RunConfig,
    Source,
    TrainConfig,
    dumps,
    load_preset,
)

TEXT = "the quick brown fox jumps over a lazy dog while seven small birds sing old songs"
WORDS = TEXT.split(" ")


def write_corpus(folder: Path, num_documents: int = 400) -> Path:
    """JSONL of short documents with some structure, the same on every call."""
    path = folder / "corpus.jsonl"
    lines = []
    for i in range(num_documents):
        words = [WORDS[(i * 7 + j * (1 + i % 3)) % len(WORDS)] for j in range(12 + i % 20)]
        lines.append(json.dumps({"text": f"{' '.join(words)} {i}."}))
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_config(corpus: Path) -> RunConfig:
    return replace(
        load_preset("demo"),
        model=ModelConfig(vocab_size=384, width=32, layers=1, heads=2, ffn_width=32),
        data=DataConfig(
            sources=(Source(paths=(str(corpus),)),),
            tokenizer_pieces=320,
            row_length=32,
            num_slots=3,
            held_out_fraction=0.1,
            open_rows=4,
        ),
        optim=OptimConfig(peak_lr=((0, 1e-2),), warmup_steps=2, total_steps=60),
        train=TrainConfig(batch_rows=4, micro_batch_rows=4, log_every_steps=2),
        fleet=FleetConfig(
            local_steps=4,
            grace_seconds=2.0,
            lease_seconds=1.0,
            guard_rows=4,
            live_seconds=20.0,
            poll_seconds=0.05,
            training_poll_seconds=0.05,
            log_seconds=1.0,
        ),
        probe=ProbeConfig(num_rows=4),
    )


def write_config(folder: Path, config: RunConfig) -> Path:
    path = folder / "run.toml"
    path.write_text(dumps(config))
    return path
