"""Two days of a fleet that comes and goes, in virtual time, and the audit of what is left.

    python bench/long_run.py [--quick]

Eight workers that live one to two and a half hours, a merger that is started again, three losses of
the whole fleet; nothing real is trained (see fleet/simulate/long_run.py).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from _common import report
from diffurefill.fleet.simulate.chaos import memory_folder
from diffurefill.fleet.simulate.long_run import LongRun

SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="half a day and one loss")
    quick = parser.parse_args().quick
    hours, losses = (12.0, 1) if quick else (48.0, 3)
    began = time.process_time()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        run = LongRun(SEED, Path(folder), hours=hours, workers=8, losses=losses)
        figures = asdict(run.run())
    seconds = round(time.process_time() - began, 1)
    report("long_run", {**figures, "seed": SEED, "cpu_seconds": seconds}, quick=quick)


if __name__ == "__main__":
    main()
