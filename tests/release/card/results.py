"""Small result files in the shapes that the commands write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from diffurefill import config as configs
from diffurefill.config import RunConfig
from diffurefill.data.tokens.tokenizer import train_tokenizer
from diffurefill.fleet import exported
from diffurefill.release.card.sources import Source, read_source
from diffurefill.train.checkpoint import save_weights

PROBE = "0123456789ab"
RUN, GENERATION = "run-7", 30


def exported_folder(folder: Path, config: RunConfig, provenance: dict[str, Any] | None) -> Path:
    """The files of an export that a card reads; in place of its weights a single number."""
    folder.mkdir()
    tokenizer = train_tokenizer(["once upon a time there was a house"] * 20, 300)
    ids = {"mask_token_id": tokenizer.mask_id, "pad_token_id": tokenizer.pad_id}
    record = {"model_type": exported.MODEL_TYPE, **ids}
    (folder / exported.CONFIG).write_text(json.dumps(record))
    (folder / exported.TOKENIZER).write_text(tokenizer.to_json())
    (folder / exported.RUN_CONFIG).write_text(configs.dumps(config))
    save_weights(folder / exported.WEIGHTS, {"w": torch.ones(1)})
    if provenance is not None:
        (folder / exported.PROVENANCE).write_text(json.dumps({"source": provenance}))
    return folder


def held_out(mean: float, with_rows: bool = True) -> dict[str, Any]:
    rows = {"0.5": [[10 * (mean - 0.25), 10], [10 * (mean + 0.25), 10]]}
    found = {"probe": PROBE, "mean": mean, "by_rate": {"0.5": mean}}
    return {**found, "rows": rows} if with_rows else found


def probe_records() -> list[dict[str, Any]]:
    nll = {"mean": 6.125, "low": 6.0, "high": 6.25, "num_items": 9, "level": 0.95}
    share = {"mean": 0.375, "low": 0.25, "high": 0.5, "num_items": 9, "level": 0.95}
    facts = {"choice": share, "exact": share, "contained": share, "nll": nll}
    accuracy = {"token": 0.625, "pair": 0.4375}
    return [
        {"model": "/home/me/run: ema", "sets": {"held_out": held_out(3.5)}, "facts": facts,
         "decoding_accuracy": accuracy},
        {"model": "global", "sets": {"held_out": held_out(3.75)}, "decoding_accuracy": None,
         "facts": None},
    ]  # fmt: skip


def progress_lines(num_generations: int) -> str:
    lines = []
    for gen in range(num_generations):
        about = {"gen": gen, "run": RUN, "probes": {"held_out": PROBE}}
        ce = {"sets": {"held_out": held_out(7.0 - 0.125 * gen, with_rows=False)}}
        if gen:
            lines.append({**about, "weights": "ema", **ce})
        figures = {"step": 50 * gen, "tokens": 1000 * gen}
        lines.append({**about, "weights": "global", **figures, **ce})
    return "\n".join(map(json.dumps, lines)) + "\n"


def task(value: float, chance: float) -> dict[str, Any]:
    return {
        "metric": "acc", "split": "test", "num_items": 200, "num_items_of_task": 2376,
        "version": 1.0, "chance": chance, "value": value,
        "interval": {"low": value - 0.0625, "high": value + 0.0625},
    }  # fmt: skip


def evaluated(parameters: int, weights_sha256: str) -> dict[str, Any]:
    """The model of these weights is the third: its EMA stands before it."""
    own = {"arc_easy": task(0.3125, 0.25), "sciq": task(0.5, 0.25)}
    other = {"arc_easy": task(0.5625, 0.25), "sciq": task(0.875, 0.25)}
    return {
        "models": [
            {"name": "untrained", "kind": "diffurefill", "weights": "untrained",
             "parameters": parameters, "scored_by": "chain", "tasks": other},
            {"name": "its EMA", "kind": "diffurefill", "weights": "ema", "parameters": parameters,
             "weights_sha256": "e" * 12, "scored_by": "chain", "tasks": other},
            {"name": "ours", "kind": "diffurefill", "weights": "swa", "parameters": parameters,
             "weights_sha256": weights_sha256, "scored_by": "chain", "tasks": own},
            {"name": "an AR model", "kind": "hf", "parameters": 1, "scored_by": "autoregressive",
             "tasks": other},
        ],
        "pairs": [], "limit": 200, "versions": {"lm_eval": "0.4.13"},
        "command": "diffurefill evaluate ours", "commit": "f" * 40,
    }  # fmt: skip


def picked() -> dict[str, Any]:
    candidates = [{"weights": "ema", **record} for record in probe_records()]
    about = {"result": "pick", "run_id": RUN, "generation": GENERATION, "rule": "the lowest"}
    return {**about, "picked": "ema", "candidates": candidates}


def source(folder: Path, name: str, content: Any) -> Source:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_source(path)
