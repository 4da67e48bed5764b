"""A reader that is killed at random moments, through every kind of source (bench/resume.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "resume.py"


def test_a_killed_reader_goes_on_with_the_very_next_row() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["identical"]
    assert found["kills"] == 8
    assert found["batches"] >= 8
