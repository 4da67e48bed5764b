"""The training step on this machine's card: compiled or not, by attention backend and micro-batch.

    python bench/card.py [--quick] [--preset base-1b] [--device cuda] [--micro-batches 4 8 16]

Each arm is `diffurefill bench train` in a process of its own, on the text of the Python library
(pieces are trained on it: nothing is fetched): tokens/s, MFU by both counts, the table of parts.
First the defaults by micro-batch; then, at the fastest one, blocks eager, and attention by each
backend that the card has. `bench attention` and `bench optimizer` of the preset come beside them.
An arm that cannot run says why and stops nothing. `best` is the fastest arm.

--quick takes one step of the preset demo in three arms, on whatever device is there, and writes no
result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from _common import report

TEXT = ("--data", "python:", "--data.tokenizer", "train", "--data.tokenizer-pieces", "8192")
BACKENDS = ("flex", "varlen", "sdpa", "loop")


def bench(name: str, *options: str) -> dict[str, Any]:
    """The figures of `diffurefill bench <name>`, or the reason why it has none."""
    command = [sys.executable, "-m", "diffurefill", "bench", name, "--json", *options]
    print(" ".join(command[2:]), file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    common: tuple[str, ...],
    timing: tuple[str, ...],
    micro_batches: list[int],
    backends: tuple[str, ...] = BACKENDS,
) -> dict[str, Any]:
    arms = {
        f"{rows} rows": bench("train", *common, *timing, *rows_at_once(rows))
        for rows in micro_batches
    }
    fastest = best_of(arms)
    rows = rows_at_once(int(fastest.split()[0])) if fastest else rows_at_once(micro_batches[0])
    arms["eager blocks"] = bench("train", *common, *timing, *rows, "--train.compile", "off")
    for backend in backends:
        arms[backend] = bench("train", *common, *timing, *rows, "--attention", backend)
    return {
        "best": best_of(arms),
        "arms": arms,
        "attention": bench("attention", *common, *rows),
        "optimizer": bench("optimizer", *common, *rows),
    }


def rows_at_once(rows: int) -> tuple[str, str]:
    return "--train.micro-batch-rows", str(rows)


def best_of(arms: dict[str, dict[str, Any]]) -> str | None:
    speeds = {name: arm["tokens_per_second"] for name, arm in arms.items() if "failed" not in arm}
    return max(speeds, key=lambda name: speeds[name]) if speeds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one step of demo, on any device")
    parser.add_argument("--preset", default="base-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    if given.quick:
        common: tuple[str, ...] = ("--preset", "demo", "--data", "python:")
        figures = measure(common, ("--steps", "1"), [16], ("sdpa",))
    else:
        common = ("--preset", given.preset, "--device", given.device, *TEXT)
        timing = ("--steps", str(given.steps), "--seconds", str(given.seconds))
        figures = measure(common, timing, given.micro_batches)
        if figures["best"] is None:
            failures = {name: arm["failed"] for name, arm in figures["arms"].items()}
            raise SystemExit(f"no arm ran, nothing is written: {failures}")
    report("card", {"preset": common[1], **figures}, quick=given.quick)


if __name__ == "__main__":
    main()
