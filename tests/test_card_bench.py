"""bench/card.py, which is for a GPU, in its smallest form: it is tried before a card is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(300)
def test_every_arm_for_a_card_runs_here(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "card.py"), "--quick"]
    environment = {**os.environ, "DIFFUREFILL_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["arms"]) == {"16 rows", "eager blocks", "sdpa"}
    for name, arm in {**found["arms"], "attention": found["attention"]}.items():
        assert "failed" not in arm, (name, arm)
    assert found["best"] in found["arms"]
    for arm in found["arms"].values():
        assert arm["tokens_per_second"] > 0
        assert sum(arm["shares"].values()) == pytest.approx(1.0, abs=0.01)
    assert "failed" not in found["optimizer"]
