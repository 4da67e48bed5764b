"""Exhaustive search of a small fleet: how many schedules and states, within which bounds.

    python bench/exhaustive.py [--quick]

Two mergers and two workers, one local step an interval, every interleaving of their effects within
each of the bounds below (see fleet/simulate/exhaustive.py for what they mean and what is not
covered); invariants are checked at every publish. States are told apart by 64-bit hashes. A search
stops at MAX_STATES and is then not `whole`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _common import report
from diffurefill.fleet.simulate.chaos import memory_folder
from diffurefill.fleet.simulate.exhaustive import Bounds, search

MAX_STATES = 6_000_000

QUICK = (
    Bounds(generations=3),
    Bounds(generations=2, crashes=1),
    Bounds(generations=1, preemptions=1, lost=1),
)
FULL = (
    *QUICK,
    Bounds(generations=3, preemptions=1),
    Bounds(generations=3, crashes=1),
    Bounds(generations=3, lost=1),
    Bounds(generations=3, idle=1),
    Bounds(generations=3, crashes=2),
    Bounds(generations=2, preemptions=1, crashes=1),
    Bounds(generations=2, preemptions=1, idle=1),
    Bounds(generations=2, preemptions=2),
    Bounds(generations=1, preemptions=1, crashes=1, idle=1),
    Bounds(generations=1, crashes=1, lost=1, idle=1),
)


def measure(bounds: Bounds) -> dict[str, Any]:
    began = time.process_time()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        found = search(bounds, Path(folder), MAX_STATES)
    figures = {
        "bounds": asdict(bounds),
        "schedules": found.schedules,
        "completed": found.completed,
        "states": found.states,
        "transitions": found.transitions,
        "places": found.places,
        "longest": found.longest,
        "publishes": found.fates["publish"],
        "deaths": found.fates["dies"],
        "lost_answers": found.fates["lost answer"],
        "lost_requests": found.fates["lost request"],
        "whole": found.is_whole,
        "violations": found.violations,
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    print(figures, file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three small bounds, under a minute")
    quick = parser.parse_args().quick
    searches = [measure(bounds) for bounds in (QUICK if quick else FULL)]
    figures = {
        "states": sum(s["states"] for s in searches),
        "schedules": sum(s["schedules"] for s in searches),
        "violations": sum(len(s["violations"]) for s in searches),
        "max_states": MAX_STATES,
        "searches": searches,
    }
    report("exhaustive", figures, quick=quick)


if __name__ == "__main__":
    main()
