"""Two minutes of random kills, pauses and twins among real processes: `pytest -m slow tests/fleet`.

Three workers and a merger, on a folder, on the test hub and on S3. The oracle is the audit of what
lies in the store afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from diffurefill.cli import main
from diffurefill.config import RunConfig
from diffurefill.fleet.status import latest_state
from diffurefill.store.base import open_store
from tests.hub_server import hub_environment, spawned_hub
from tests.tiny import tiny_config, write_config, write_corpus

CHAOS_SECONDS = float(os.environ.get("DIFFUREFILL_CHAOS_SECONDS", "120"))
PATIENCE_SECONDS = 180.0
NUM_WORKERS = 3
ACTS = ("kill", "kill", "pause", "twin")


class Fleet:
    """One merger and three workers, each under a name; what dies is started again."""

    def __init__(self, store: str, log: Path) -> None:
        self._commands = {"merger": ("merger", store)}
        for number in range(NUM_WORKERS):
            self._commands[f"w{number}"] = ("worker", store, "--worker", str(number))
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

    def vanish(self) -> None:
        """Everybody at once."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self.revive()

    def revive(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.processes[name] = self._start(name)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._log.close()


@pytest.fixture(params=["folder", "hub", "s3"])
def uri(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A place for a run that other processes can reach."""
    if request.param == "folder":
        yield str(tmp_path / "run")
    elif request.param == "s3":
        yield request.getfixturevalue("s3_bucket")
    else:
        with spawned_hub(tmp_path / "hub") as hub:
            hub_environment(monkeypatch, hub, tmp_path / "home", token="hf_alice")
            yield "hf://alice/run"
            huggingface_hub.close_session()


def chaos_config(tmp_path: Path) -> RunConfig:
    config = tiny_config(write_corpus(tmp_path))
    fleet = dataclasses.replace(config.fleet, poll_seconds=0.3, codec="int8-delta", compact_every=9)
    data = dataclasses.replace(config.data, num_slots=NUM_WORKERS)
    return dataclasses.replace(config, fleet=fleet, data=data)


def torment(fleet: Fleet, chance: random.Random, seconds: float) -> Counter[str]:
    """Kills, pauses and twins at random for so long; the whole fleet vanishes twice."""
    began, done = time.monotonic(), Counter[str]()
    losses = [seconds / 3, 2 * seconds / 3]
    while (elapsed := time.monotonic() - began) < seconds:
        if losses and elapsed >= losses[0]:
            losses.pop(0)
            fleet.vanish()
            done["fleet losses"] += 1
        time.sleep(chance.uniform(3.0, 10.0))
        name, act = chance.choice(sorted(fleet.processes)), chance.choice(ACTS)
        if act == "kill":
            fleet.kill(name)
        else:
            {"pause": fleet.pause, "twin": fleet.twin}[act](name, chance.uniform(0.2, 4.0))
        done[f"{act}s"] += 1
        fleet.revive()
    return done


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_kills_pauses_and_twins_leave_a_sound_run(
    tmp_path: Path, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("DIFFUREFILL_CHAOS_SEED", "1"))
    config = write_config(tmp_path, chaos_config(tmp_path))
    assert main(["init", uri, "--config", str(config)]) == 0
    fleet = Fleet(uri, tmp_path / "log")
    try:
        done = torment(fleet, random.Random(seed), CHAOS_SECONDS)
        before = latest_state(open_store(uri)).gen
        deadline = time.monotonic() + PATIENCE_SECONDS
        while latest_state(open_store(uri)).gen < before + 2:
            fleet.revive()
            assert time.monotonic() < deadline, "no progress after the chaos"
            time.sleep(0.5)
    finally:
        fleet.end()
    capsys.readouterr()
    assert main(["audit", uri]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "Traceback" not in (tmp_path / "log").read_text()
    state = latest_state(open_store(uri))
    record = {"store": uri.split(":")[0] if ":" in uri else "folder", "seed": seed, **done}
    record |= {"generations": state.gen, "epochs": state.epoch, "audit": verdict}
    if path := os.environ.get("DIFFUREFILL_CHAOS_RECORD"):
        with Path(path).open("a") as f:
            f.write(json.dumps(record) + "\n")
