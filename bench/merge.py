"""Streaming merge against loading everything: time and peak memory, side by side.

    python bench/merge.py [--quick] [--params MILLIONS]

Four bf16 deltas of a synthetic model (1.08 billion parameters, 2.15 GB each; --quick: 14 million)
are merged into its fp32 weights, and the EMA and the SWA are moved on: by `FileAverager.merge` in
one pass over safetensors files, and the plain way over .pt files: torch.load all four, stack, mean
in fp32, torch.save; then the same for each side average. The plain way here drops what it no longer
needs, or it would not fit this machine.

Repetitions alternate between the ways, each in a process of its own: ours on all cores, ours on one
thread, the plain way on one thread (loading and saving have no more, and where other processes run
its arithmetic is several times slower on two). Every one ends with its outputs fsynced; `seconds`
is the wall time of all that, `cpu_seconds` the user and system time of the process. The outputs are
compared bit for bit. Ratios are plain over ours, of medians; `time_ratio_one_thread` and
`cpu_ratio` compare with ours on one thread. Peak memory is resident memory. Without the memory for
the plain way only ours is run, and the ratios are null.

Inputs are first `fetched`: read through once, as a merger does when it checks the sha256 of what it
has downloaded, so what the page cache can hold of them is there. Then the same with `cold` inputs,
put out of the page cache; the `_cold` figures are of these. The full size is the disk's work in
both ways, cold above all: 21 GB are read and 13 GB written. `time_ratio_in_memory` is of a model of
150 million parameters whose files lie in memory, without a disk in the way.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from _common import peak_mb, report
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.records import Fold, Payload
from diffurefill.runtime import set_threads

MEMORY = Path("/dev/shm")
NUM_DELTAS = 4
CODEC = "bf16-delta"
DELTAS = [f"delta{i}" for i in range(NUM_DELTAS)]
OUTPUTS = ("global", "ema", "swa")
KEEPS = {"ema": 0.9, "swa": 129 / 130}
INPUTS = ["base", *KEEPS, *DELTAS]
SEED = 0
FULL_PARAMS, MEMORY_PARAMS, QUICK_PARAMS = 1_076, 150, 14
"""Millions of parameters."""


def shapes(millions: int) -> dict[str, tuple[int, ...]]:
    """A transformer's tensors, large and tiny ones; as many layers as the size asks for."""
    vocab, width, ffn = (73_760, 2048, 5632) if millions > 500 else (8192, 384, 1024)
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (vocab, width)}
    layer = 4 * width * width + 3 * width * ffn
    for i in range(max(round((millions * 1e6 - vocab * width) / layer), 1)):
        found |= {
            f"blocks.{i}.norm.weight": (width,),
            f"blocks.{i}.qkv.weight": (3 * width, width),
            f"blocks.{i}.out.weight": (width, width),
            f"blocks.{i}.gate_up.weight": (2 * ffn, width),
            f"blocks.{i}.down.weight": (width, ffn),
        }
    return found


# --- files ----------------------------------------------------------------------------------------


def make_files(folder: Path, sizes: dict[str, tuple[int, ...]]) -> None:
    """The weights, the side averages and the deltas, as safetensors and as .pt, on the disk."""
    for index, name in enumerate(INPUTS):
        generator = torch.Generator().manual_seed(SEED + index)
        tensors = {
            n: torch.rand(shape, generator=generator).sub_(0.5) for n, shape in sizes.items()
        }
        if name in DELTAS:
            tensors = {n: tensor.mul_(1e-3).bfloat16() for n, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")
        torch.save(tensors, folder / f"{name}.pt")
        for path in folder.glob(f"{name}.*"):
            fsync(path)


def fsync(path: Path) -> None:
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def leave_page_cache(path: Path) -> None:
    with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(path: Path) -> None:
    with open(path, "rb", buffering=0) as f:
        while f.read(1 << 22):
            pass


# --- the two ways ---------------------------------------------------------------------------------


def merge_ours(folder: Path) -> None:
    paths = {name: folder / f"{name}.safetensors" for name in INPUTS}
    FileAverager().merge(
        paths["base"],
        [Payload(paths[name], CODEC, 1.0) for name in DELTAS],
        folder / "global.out",
        folds=[Fold(paths[name], keep, folder / f"{name}.out") for name, keep in KEEPS.items()],
    )


def merge_naive(folder: Path) -> None:
    deltas = [torch.load(folder / f"{name}.pt", weights_only=True) for name in DELTAS]
    new = {
        name: torch.stack([delta[name] for delta in deltas]).float().mean(0) for name in deltas[0]
    }
    del deltas
    base = torch.load(folder / "base.pt", weights_only=True)
    for name, tensor in new.items():
        tensor += base[name]
    del base
    save_naive(new, folder / "global.out")
    for side, keep in KEEPS.items():
        average = torch.load(folder / f"{side}.pt", weights_only=True)
        for name, tensor in average.items():
            tensor *= keep
            tensor += (1.0 - keep) * new[name]
        save_naive(average, folder / f"{side}.out")
        del average


def save_naive(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path)
    fsync(path)


ALL_CORES = os.cpu_count() or 1
WAYS = {
    "ours": (merge_ours, ALL_CORES),
    "ours_one_thread": (merge_ours, 1),
    "naive": (merge_naive, 1),
}
"""Name -> (what to run, number of threads)."""


def run_child(way: str, folder: Path) -> None:
    """One repetition; its figures go to stdout as JSON."""
    # Should memory run out, this process is the one to end.
    Path("/proc/self/oom_score_adj").write_text("1000")
    merge, num_threads = WAYS[way]
    set_threads(num_threads, keeps_memory=False)
    began, before = time.perf_counter(), os.times()
    merge(folder)
    seconds, after = time.perf_counter() - began, os.times()
    cpu = after.user - before.user + after.system - before.system
    figures = {"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak_mb()}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def measure(way: str, inputs: str, folder: Path) -> dict[str, float]:
    """Run `way` once, on inputs that must come from the disk, or that were just fetched."""
    for path in folder.glob("*.*"):
        leave_page_cache(path)
    if inputs == "fetched":
        suffix = "pt" if way == "naive" else "safetensors"
        for name in INPUTS:
            read_through(folder / f"{name}.{suffix}")
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the {way} merge ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def take_outputs(way: str, folder: Path) -> str:
    """sha256 over the values of every output, which are then removed."""
    digest = hashlib.sha256()
    for name in OUTPUTS:
        path = folder / f"{name}.out"
        if way != "naive":
            tensors = safetensors.torch.load_file(path)
        else:
            tensors = torch.load(path, weights_only=True, mmap=True)
        for _, tensor in sorted(tensors.items()):
            digest.update(tensor.numpy())
        del tensors, tensor
        path.unlink()
    return digest.hexdigest()


# --- the comparison -------------------------------------------------------------------------------


def affordable_ways(num_params: int) -> list[str]:
    """The plain way holds four bf16 deltas, their fp32 mean, and the largest tensor stacked."""
    needed = num_params * (NUM_DELTAS * 2 + 4) * 1.2
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    available = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    if available > needed:
        return list(WAYS)
    print(
        f"plain way left out: {available / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed",
        file=sys.stderr,
    )
    return [way for way in WAYS if way != "naive"]


def compare(folder: Path, millions: int, repeats: int) -> dict[str, Any]:
    sizes = shapes(millions)
    num_params = sum(math.prod(shape) for shape in sizes.values())
    needed = num_params * (2 * (NUM_DELTAS * 2 + 3 * 4) + 3 * 4) * 1.05
    if shutil.disk_usage(folder).free < needed:
        raise SystemExit(f"this needs {needed / 1e9:.0f} GB of disk: set TMPDIR, or give --params")
    load = round(os.getloadavg()[0], 2)
    make_files(folder, sizes)
    ways = affordable_ways(num_params)
    states = ("fetched", "cold")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        inputs: {way: [] for way in ways} for inputs in states
    }
    digests = set()
    for repeat, inputs, way in itertools.product(range(repeats), states, ways):
        figures = measure(way, inputs, folder)
        runs[inputs][way].append(figures)
        print(f"{inputs:>7} {way:>15} {repeat + 1}/{repeats}: {figures}", file=sys.stderr)
        digests.add(take_outputs(way, folder))
    assert len(digests) == 1, "the two merges differ"

    def median(way: str, figure: str, inputs: str) -> float:
        return statistics.median(run[figure] for run in runs[inputs][way])

    def ratio(figure: str, way: str = "ours", inputs: str = "fetched") -> float | None:
        if "naive" not in ways:
            return None
        return round(median("naive", figure, inputs) / median(way, figure, inputs), 2)

    return {
        "time_ratio": ratio("seconds"),
        "time_ratio_one_thread": ratio("seconds", "ours_one_thread"),
        "time_ratio_cold": ratio("seconds", inputs="cold"),
        "cpu_ratio": ratio("cpu_seconds", "ours_one_thread"),
        "memory_ratio": ratio("peak_mb"),
        "peak_mb": median("ours", "peak_mb", "fetched"),
        "seconds": round(median("ours", "seconds", "fetched"), 3),
        "seconds_cold": round(median("ours", "seconds", "cold"), 3),
        "num_params": num_params,
        "num_deltas": NUM_DELTAS,
        "codec": CODEC,
        "seed": SEED,
        "load_average_before": load,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute")
    parser.add_argument("--params", type=int, help="millions of parameters")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        run_child(arguments.way, arguments.folder)
        return
    millions = arguments.params or (QUICK_PARAMS if arguments.quick else FULL_PARAMS)
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(Path(folder), millions, arguments.repeats)
    if not arguments.quick and MEMORY.is_dir():
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            in_memory = compare(Path(folder), MEMORY_PARAMS, arguments.repeats)
        figures["time_ratio_in_memory"] = in_memory["time_ratio"]
        figures["in_memory"] = in_memory
    report("merge", figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
