"""What each codec costs and loses: size, seconds and error of a contribution, next to fp32.

    python bench/codec.py [--quick]

Two workers train the `demo` model with AdamW from a common base, each on its slot (full: 300 steps
to the base, then 150; --quick: 20, then 10). Their deltas go through every codec. `error` is the L2
norm of what is lost over that of the delta (mean of the two); `merged_error` the same for the mean
of the two deltas; `ce_difference` the held-out CE of the merged model minus that after fp32, nats
per masked token. `size_ratio`, `encode_ratio` and `read_ratio` are over fp32: bytes of the file,
and seconds to write it and to read and check it (`inspect`), for random weights (full: 67 million;
--quick: 4 million), one thread, medians of 3 alternating repetitions on a warm disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _common import report
from diffurefill.config import OptimConfig, RunConfig, load_preset
from diffurefill.data.documents import open_corpus
from diffurefill.evaluate.probe_sets import build_probe
from diffurefill.evaluate.probes import held_out_ce
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.codec import CODECS, DeltaFile, encode_delta
from diffurefill.fleet.records import Payload
from diffurefill.runtime import set_threads
from diffurefill.train.checkpoint import load_weights, save_weights, schema
from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer

NUM_WORKERS = 2
REPEATS = 3
COLS = 2048

Weights = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute; writes no result")
    quick = parser.parse_args().quick
    set_threads(1)
    steps = (20, 10) if quick else (300, 150)
    rows = 2048 if quick else 32_768
    optim = OptimConfig(peak_lr=((0, 3e-3),), warmup_steps=20, total_steps=3000)
    config = replace(load_preset("demo"), optim=optim)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = trained(config, *steps, folder)
        costs = timed(folder, rows)
    figures = {
        "steps": steps,
        "num_workers": NUM_WORKERS,
        "timed_params": rows * COLS,
        "codecs": {codec: {**losses[codec], **costs[codec]} for codec in CODECS},
    }
    report("codec", figures, quick=quick)


# --- what is lost, on trained deltas --------------------------------------------------------------


def trained(config: RunConfig, base_steps: int, local_steps: int, folder: Path) -> dict[str, Any]:
    corpus = open_corpus(config.data)
    tokenizer = make_tokenizer(config, corpus)
    probe = build_probe(config, corpus, tokenizer)

    def train(start: Weights, step: int, steps: int, slot: int) -> Trainer:
        trainer = Trainer(config, corpus, tokenizer, slot=slot, interval_steps=steps)
        trainer.load_weights(start, step=step)
        trainer.seek(None)
        for _ in range(steps):
            trainer.take_step()
        trainer.close()
        return trainer

    first = train(initial_weights(config), 0, base_steps, NUM_WORKERS)
    save_weights(folder / "base", first.weights())
    workers = [
        train(load_weights(folder / "base"), base_steps, local_steps, slot).weights()
        for slot in range(NUM_WORKERS)
    ]
    found = {codec: merged(folder, workers, codec) for codec in CODECS}
    exact_deltas, exact = found["fp32-delta"]
    base = load_weights(folder / "base")
    ces = {}
    for codec, (_, weights) in found.items():
        first.load_weights(weights, step=0)
        ces[codec] = held_out_ce(
            first.model, probe, mask_id=tokenizer.mask_id, device=first.device
        ).mean
    return {
        codec: {
            "error": statistics.mean(map(relative_error, deltas, exact_deltas)),
            "merged_error": relative_error(minus(weights, base), minus(exact, base)),
            "held_out_ce": ces[codec],
            "ce_difference": ces[codec] - ces["fp32-delta"],
        }
        for codec, (deltas, weights) in found.items()
    }


def merged(folder: Path, workers: list[Weights], codec: str) -> tuple[list[Weights], Weights]:
    """The decoded deltas of `workers` through `codec`, and the merged weights."""
    paths = [folder / f"delta{i}" for i in range(len(workers))]
    for path, weights in zip(paths, workers, strict=True):
        encode_delta(folder / "base", weights, path, codec=codec)
    FileAverager().merge(
        folder / "base", [Payload(path, codec, 1.0) for path in paths], folder / "next"
    )
    return [decoded(path, codec, folder / "base") for path in paths], load_weights(folder / "next")


def decoded(path: Path, codec: str, base: Path) -> Weights:
    base_schema = schema(base)
    with DeltaFile(path, codec, base_schema) as f:
        return {
            name: f.read(name, 0, torch.empty(shape).flatten()).reshape(shape)
            for name, (_, shape) in base_schema.items()
        }


def minus(one: Weights, other: Weights) -> Weights:
    return {name: one[name] - other[name] for name in one}


def relative_error(found: Weights, exact: Weights) -> float:
    lost = sum(float((found[n].double() - exact[n].double()).square().sum()) for n in exact)
    whole = sum(float(exact[n].double().square().sum()) for n in exact)
    return (lost / whole) ** 0.5


# --- what it costs, on random weights -------------------------------------------------------------


def timed(folder: Path, rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(rows, COLS, generator=generator)}
    new = {"w": base["w"] + 1e-3 * torch.randn(rows, COLS, generator=generator)}
    save_weights(folder / "large", base)
    seconds: dict[str, dict[str, list[float]]] = {c: {"encode": [], "read": []} for c in CODECS}
    for _ in range(REPEATS):
        for codec in CODECS:
            began = time.perf_counter()
            encode_delta(folder / "large", new, folder / codec, codec=codec)
            written = time.perf_counter()
            FileAverager().inspect(folder / codec, codec, folder / "large")
            seconds[codec]["encode"].append(written - began)
            seconds[codec]["read"].append(time.perf_counter() - written)
    medians = {
        codec: {name: statistics.median(values) for name, values in by_name.items()}
        for codec, by_name in seconds.items()
    }
    sizes = {codec: (folder / codec).stat().st_size for codec in CODECS}
    exact, plain = sizes["fp32-delta"], medians["fp32-delta"]
    return {
        codec: {
            "bytes_per_param": round(sizes[codec] / (rows * COLS), 4),
            "size_ratio": round(exact / sizes[codec], 3),
            "encode_seconds": round(medians[codec]["encode"], 3),
            "encode_ratio": round(plain["encode"] / medians[codec]["encode"], 2),
            "read_ratio": round(plain["read"] / medians[codec]["read"], 2),
        }
        for codec in CODECS
    }


if __name__ == "__main__":
    main()
