"""Which text a fleet has really trained on: the real loader in simulated fleets.

    python bench/lineage.py [--quick]

20 fleets of 3 slots for 400 generations each (--quick: 2 of 60), with workers and mergers killed at
any moment, two workers on one slot, sessions that end early, rollbacks and losses of the whole
fleet (fleet/simulate/lineage.py). `repeated` and `skipped` must be 0: rows in the lineage of the
last global, against the unbroken row stream of each slot. Exit code 1 when they are not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from _common import report
from diffurefill.config import DataConfig, Source
from diffurefill.data.documents import open_corpus, texts_of
from diffurefill.data.tokens.tokenizer import train_tokenizer
from diffurefill.fleet.simulate.chaos import memory_folder
from diffurefill.fleet.simulate.lineage import Lineage, LineageRun

NUM_DOCUMENTS = 900
SUMS = ("generations", "intervals", "rows", "repeated", "skipped", "wasted", "launches")


def write_corpus(folder: Path) -> DataConfig:
    path = folder / "text.jsonl"
    words = ["owl", "hill", "river", "seven", "quiet", "lamp", "over", "the", "ran", "while"]
    lines = []
    for number in range(NUM_DOCUMENTS):
        chosen = [words[(number * 7 + at * 3) % len(words)] for at in range(number * 11 % 45)]
        lines.append(json.dumps({"text": f"Text {number}: {' '.join(chosen)}"}))
    path.write_text("\n".join(lines))
    return DataConfig(
        sources=(Source(paths=(str(path),)),),
        num_slots=3,
        row_length=64,
        span_rows=0.25,
        short_rows=0.1,
        short_length=16,
    )


def run_one(data: DataConfig, rounds: int, seed: int) -> Lineage:
    corpus = open_corpus(data)
    tokenizer = train_tokenizer(texts_of(corpus.sources["text"]), 320)
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        return LineageRun(seed, Path(folder), corpus, tokenizer, data).run(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short runs")
    quick = parser.parse_args().quick
    runs, rounds = (2, 60) if quick else (20, 400)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor() as pool:
        data = write_corpus(Path(folder))
        found = []
        for one in pool.map(partial(run_one, data, rounds), range(runs)):
            found.append(one)
            print(f"run {len(found)}/{runs}: {one}", file=sys.stderr)
    figures = {name: sum(getattr(one, name) for one in found) for name in SUMS}
    figures["rollbacks"] = sum(one.rollbacks for one in found)
    violations = [violation for one in found for violation in one.violations]
    record = {"runs": runs, **figures, "violations": len(violations)}
    record["seconds"] = round(time.perf_counter() - began, 1)
    report("lineage", {**record, "by_run": [asdict(one) for one in found]}, quick=quick)
    sys.exit(bool(figures["repeated"] or figures["skipped"] or violations))


if __name__ == "__main__":
    main()
