"""Real processes under random SIGKILL and SIGSTOP, many times over, on every kind of store.

    python bench/kills.py [--times 10] [--seconds 120] [--stores folder,hub,s3] [--quick]

Each time is `tests/fleet/test_chaos.py` with another seed: three workers and a merger on a folder,
on the test hub (through the real client) or on an S3 server; two total losses of the fleet among
the kills. Afterwards the run must go on and its audit must be clean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _common import report

ROOT = Path(__file__).resolve().parents[1]
STORES = ("folder", "hub", "s3")


def run_once(store: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    """The record of one run; `passed` is False with the test's last words when it failed."""
    record, place = folder / f"{store}-{seed}.jsonl", folder / f"{store}-{seed}"
    env = {
        **os.environ,
        "DIFFUREFILL_CHAOS_SECONDS": str(seconds),
        "DIFFUREFILL_CHAOS_SEED": str(seed),
        "DIFFUREFILL_CHAOS_RECORD": str(record),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-k", store]
    command += ["--basetemp", str(place)]
    done = subprocess.run(
        [*command, "tests/fleet/test_chaos.py"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if done.returncode == 0:
        return {**json.loads(record.read_text()), "passed": True}
    logs = "".join(path.read_text()[-4000:] for path in place.glob("*/log"))
    said = {"said": done.stdout[-2000:], "log": logs}
    return {"store": store, "seed": seed, "passed": False, **said}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--stores", default=",".join(STORES))
    parser.add_argument("--quick", action="store_true", help="once on a folder, for 15 seconds")
    args = parser.parse_args()
    stores = ["folder"] if args.quick else args.stores.split(",")
    times, seconds = (1, 15.0) if args.quick else (args.times, args.seconds)
    runs = []
    # All stores at once: the machine is crowded, as it should be here.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(stores)) as pool:
        for seed in range(1, times + 1):
            run = partial(run_once, seed=seed, seconds=seconds, folder=Path(folder))
            for done in pool.map(run, stores):
                runs.append(done)
                print(json.dumps(done), flush=True)
    totals: Counter[str] = Counter()
    for run in runs:
        totals.update({k: v for k, v in run.items() if isinstance(v, int) and k != "seed"})
    facts = {
        "runs": len(runs),
        "passed": sum(run["passed"] for run in runs),
        "seconds_of_chaos": seconds,
        "kills": totals["kills"],
        "pauses": totals["pauses"],
        "twins": totals["twins"],
        "fleet_losses": totals["fleet losses"],
        "generations": totals["generations"],
    }
    report("kills", {**facts, "each": runs}, quick=args.quick)


if __name__ == "__main__":
    main()
