"""A minute of random kills, pauses and twins among real processes: `pytest -m slow tests/fleet`.

The oracle is the audit of what lies in the store.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffurefill.cli import main
from diffurefill.fleet.status import latest_state
from diffurefill.store.base import open_store
from tests.tiny import tiny_config, write_config, write_corpus

CHAOS_SECONDS = 60.0
PATIENCE_SECONDS = 120.0


class Fleet:
    """One merger and two workers, each under a name; what dies is started again."""

    def __init__(self, store: str, log: Path) -> None:
        self._commands = {
            "merger": ("merger", store),
            "w0": ("worker", store, "--worker", "0"),
            "w1": ("worker", store, "--worker", "1"),
        }
        self._log = log.open("a")
        self.processes = {name: self._start(name) for name in self._commands}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "diffurefill", *self._commands[name]],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()
        self.processes[name] = self._start(name)

    def pause(self, name: str, seconds: float) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.processes[name].send_signal(signal.SIGCONT)

    def twin(self, name: str, seconds: float) -> None:
        """A second process in the same part while the first still runs."""
        first, self.processes[name] = self.processes[name], self._start(name)
        time.sleep(seconds)
        first.kill()
        first.wait()

    def revive(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.processes[name] = self._start(name)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._log.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills_pauses_and_twins_leave_a_sound_run(tmp_path: Path, seed: int) -> None:
    config = write_config(tmp_path, tiny_config(write_corpus(tmp_path)))
    store = str(tmp_path / "run")
    assert main(["init", store, "--config", str(config)]) == 0
    fleet, chance = Fleet(store, tmp_path / "log"), random.Random(seed)
    try:
        end = time.monotonic() + CHAOS_SECONDS
        while time.monotonic() < end:
            time.sleep(chance.uniform(1.0, 5.0))
            name = chance.choice(sorted(fleet.processes))
            act = chance.choice([fleet.kill, fleet.kill, fleet.pause, fleet.twin])
            act(name) if act == fleet.kill else act(name, chance.uniform(0.2, 4.0))
            fleet.revive()
        before = latest_state(open_store(store)).gen
        deadline = time.monotonic() + PATIENCE_SECONDS
        while latest_state(open_store(store)).gen < before + 2:
            fleet.revive()
            assert time.monotonic() < deadline, "no progress after the chaos"
            time.sleep(0.2)
    finally:
        fleet.end()
    assert main(["audit", store]) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
