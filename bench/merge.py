"""Streaming merge against loading everything: time and peak memory, side by side.

    python bench/merge.py [--quick]

Four fp32 deltas of a synthetic model (213M parameters; --quick: 14M) are merged into their base by
`fleet.averaging` and by the plain way: load all, stack, mean, save. Repetitions alternate between
the two, each in a process of its own with one thread; both end with the file fsynced, and the two
results are compared bit for bit. Ratios are plain over ours, of medians. Peak memory is resident
memory, mapped files included. The kernel may drop those when it must, so `memory_ratio_floor`
counts for the plain way only what it holds besides them at its end, and for ours all we ever held.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from _common import anonymous_mb, peak_mb, report
from diffurefill.fleet.averaging import mean_of_deltas
from diffurefill.runtime import set_threads
from diffurefill.train.tensorfile import StreamingWriter, TensorFile, chunks

NUM_DELTAS = 4
REPEATS = 3
SEED = 0


def shapes(quick: bool) -> dict[str, tuple[int, ...]]:
    """A transformer's tensors; large and tiny ones, as in a real model."""
    vocab, width, layers, ffn = (8192, 384, 6, 1024) if quick else (32_768, 1024, 14, 2816)
    found: dict[str, tuple[int, ...]] = {"embedding": (vocab, width)}
    for i in range(layers):
        found |= {
            f"blocks.{i}.norm": (width,),
            f"blocks.{i}.qkv": (3 * width, width),
            f"blocks.{i}.out": (width, width),
            f"blocks.{i}.up": (2 * ffn, width),
            f"blocks.{i}.down": (width, ffn),
        }
    return found


def make_files(folder: Path, quick: bool) -> None:
    schema = {name: ("F32", shape) for name, shape in shapes(quick).items()}
    for index, path in enumerate([folder / "base", *delta_paths(folder)]):
        generator = torch.Generator().manual_seed(SEED + index)
        with StreamingWriter(path, schema) as f:
            for name, start, stop in chunks(schema):
                f.write(name, torch.randn(stop - start, generator=generator))


def delta_paths(folder: Path) -> list[Path]:
    return [folder / f"delta{i}" for i in range(NUM_DELTAS)]


# --- the two ways: each returns what it still holds at its end ------------------------------------


def merge_ours(folder: Path) -> None:
    mean_of_deltas(folder / "base", [(p, 1.0) for p in delta_paths(folder)], folder / "ours")


def merge_naive(folder: Path) -> dict[str, torch.Tensor]:
    base = safetensors.torch.load_file(folder / "base")
    deltas = [safetensors.torch.load_file(path) for path in delta_paths(folder)]
    merged = {
        name: tensor + torch.stack([delta[name] for delta in deltas]).mean(0)
        for name, tensor in base.items()
    }
    safetensors.torch.save_file(merged, folder / "naive")
    with open(folder / "naive", "rb") as f:
        os.fsync(f.fileno())
    return merged


WAYS = {"ours": merge_ours, "naive": merge_naive}


def run_child(way: str, folder: Path) -> None:
    """One repetition; its figures go to stdout as JSON."""
    began = time.perf_counter()
    held = WAYS[way](folder)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb(), "held_mb": anonymous_mb()}))
    del held  # kept until here: it is what `held_mb` counts


def measure(way: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def same_tensors(one: Path, other: Path) -> bool:
    with TensorFile(one) as a, TensorFile(other) as b:
        return a.schema == b.schema and all(
            torch.equal(
                a.read(name, start, torch.empty(stop - start)),
                b.read(name, start, torch.empty(stop - start)),
            )
            for name, start, stop in chunks(a.schema)
        )


def compare(folder: Path, quick: bool) -> dict[str, Any]:
    make_files(folder, quick)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for repeat in range(REPEATS):
        for way in WAYS:
            runs[way].append(measure(way, folder))
            print(f"{way:>6} {repeat + 1}/{REPEATS}: {runs[way][-1]}", file=sys.stderr)
    assert same_tensors(folder / "ours", folder / "naive"), "the two merges differ"

    def median(way: str, figure: str) -> float:
        return statistics.median(run[figure] for run in runs[way])

    return {
        "time_ratio": round(median("naive", "seconds") / median("ours", "seconds"), 2),
        "memory_ratio": round(median("naive", "peak_mb") / median("ours", "peak_mb"), 2),
        "memory_ratio_floor": round(median("naive", "held_mb") / median("ours", "peak_mb"), 2),
        "peak_mb": median("ours", "peak_mb"),
        "seconds": round(median("ours", "seconds"), 3),
        "model_mb": round((folder / "base").stat().st_size / 1e6, 1),
        "num_deltas": NUM_DELTAS,
        "seed": SEED,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_threads(1)
    if arguments.way:
        run_child(arguments.way, arguments.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(Path(folder), arguments.quick)
    report("merge", figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
