"""What it brings that freed memory is kept: training steps with glibc as it is, and as we set it.

    python bench/allocator.py [--quick]

Every run has a process of its own, the two settings by turns, one thread; CPU seconds of a step,
the system's part included, after two that are not counted: the median of the runs' medians. Text
is the Python library's. `gain` is glibc's time over ours, `page_faults` are of a step, `peak_mb`
the most that a process held. (full: three runs each of the presets; --quick: one of the demo's)
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from _common import peak_mb, report
from diffurefill import runtime
from diffurefill.config import load_preset
from diffurefill.data.documents import open_corpus
from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer

SETTINGS = ("glibc", "ours")
STEPS = {"demo": 20, "stand-micro": 8, "stand-38m": 3}
"""Counted, in a run."""
ROWS = {"stand-38m": 8}
"""Of a step; elsewhere the preset's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="seconds; writes no result")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one)))
        return
    presets, repeats = (["demo"], 1) if options.quick else (list(STEPS), 3)
    figures = {"repeats": repeats, "presets": {name: compared(name, repeats) for name in presets}}
    report("allocator", figures, quick=options.quick)


def compared(preset: str, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for _ in range(repeats):
        for setting in SETTINGS:
            command = [sys.executable, __file__, "--one", preset, setting]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs[setting].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{preset}, {setting}: {runs[setting][-1]}", file=sys.stderr)
    found = {
        name: {key: statistics.median(run[key] for run in of_setting) for key in of_setting[0]}
        for name, of_setting in runs.items()
    }
    gain = found["glibc"]["cpu_seconds"] / found["ours"]["cpu_seconds"]
    return {"gain": round(gain, 3), **found}


def measured(preset: str, setting: str) -> dict[str, float]:
    if setting == "glibc":
        runtime._keep_freed_memory = lambda: None
    runtime.set_threads(1)
    config = load_preset(preset)
    rows = ROWS.get(preset, config.train.batch_rows)
    config = replace(config, train=replace(config.train, batch_rows=rows))
    corpus = open_corpus(config.data)
    tokenizer = make_tokenizer(config, corpus)
    trainer = Trainer(config, corpus, tokenizer, slot=0, interval_steps=100)
    trainer.load_weights(initial_weights(config), step=0)
    trainer.seek(None)
    seconds, faults = [], []
    for _ in range(2 + STEPS[preset]):
        began, before = time.process_time(), page_faults()
        trainer.take_step()
        seconds.append(time.process_time() - began)
        faults.append(page_faults() - before)
    trainer.close()
    return {
        "cpu_seconds": round(statistics.median(seconds[2:]), 4),
        "page_faults": statistics.median(faults[2:]),
        "peak_mb": peak_mb(),
    }


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    main()
