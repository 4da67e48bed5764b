"""Real processes on a real folder: init, a merger and workers, SIGKILL, restart, audit.

The oracle is what lies in the store, never a process's exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffurefill.cli import main
from diffurefill.demo.processes import Child, start_doomed_merger
from diffurefill.fleet import records
from diffurefill.fleet.status import latest_state
from diffurefill.store.base import open_store, read_json
from tests.tiny import tiny_config, write_config, write_corpus

PATIENCE_SECONDS = 120.0


@pytest.fixture
def store(tmp_path: Path) -> str:
    config = write_config(tmp_path, tiny_config(write_corpus(tmp_path)))
    uri = str(tmp_path / "run")
    assert main(["init", uri, "--config", str(config)]) == 0
    return uri


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `diffurefill ...`; what still runs at the end is ended, by pid."""
    running: list[subprocess.Popen[str]] = []

    def launch(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "diffurefill", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        running.append(process)
        return process

    yield launch
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)


def generation(store: str) -> int:
    return latest_state(open_store(store)).gen


def incarnation(store: str, lane: str) -> str | None:
    """Who holds a worker's lane; None for a lane nobody has registered on."""
    version = open_store(store).head(lane)
    if version is None:
        return None
    path = records.worker_paths(int(lane[2:])).registration
    return read_json(open_store(store), version, path)["incarnation"]


def test_a_worker_and_a_merger_are_killed_and_nothing_is_lost(
    store: str, start: Callable[..., subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    doomed = start_doomed_merger(store, 2)
    first = start("worker", store, "--worker", "0")
    start("worker", store, "--worker", "1")
    try:
        wait_until("generation 1", lambda: generation(store) >= 1)
        wait_until("worker 0", lambda: incarnation(store, "w-00") is not None)
        before = incarnation(store, "w-00")
        first.send_signal(signal.SIGKILL)
        heir = start("worker", store, "--worker", "0")
        assert doomed.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        assert generation(store) == 1, "it died before it published"
    finally:
        doomed.stop()
    start("merger", store)
    wait_until("the restarted worker", lambda: incarnation(store, "w-00") != before)
    joined = generation(store)
    wait_until("four more generations", lambda: generation(store) >= joined + 4)
    heir.kill()
    said = heir.communicate()[0]
    assert "register found the lane of incarnation" in said
    capsys.readouterr()
    assert main(["audit", store]) == 0
    shown = capsys.readouterr().out
    assert " 0 violations" in shown
    state = latest_state(open_store(store))
    assert state.epoch == 2
    assert state.step >= 5 * 4


def test_a_flipped_byte_in_a_real_run_fails_the_audit(
    store: str, start: Callable[..., subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    start("worker", store, "--worker", "0")
    merger = start("merger", store, "--generations", "2")
    assert merger.wait(PATIENCE_SECONDS) == 0
    state = latest_state(open_store(store))
    sha = state.accepted[0].payload.sha256
    blob = next(Path(store).rglob(f"*{sha[2:]}*"))
    content = bytearray(blob.read_bytes())
    content[-5] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(bytes(content))
    capsys.readouterr()
    assert main(["audit", store]) == 1
    shown = capsys.readouterr().out
    assert "violated" in shown
    assert sha[:8] in shown or "damaged" in shown


def test_two_workers_of_one_number_leave_one(
    store: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start("worker", store, "--worker", "2")
    wait_until("the first worker", lambda: incarnation(store, "w-02") is not None)
    start("worker", store, "--worker", "2")
    said = first.communicate(timeout=PATIENCE_SECONDS)[0]
    assert first.returncode == 2
    assert "error: another process took over worker 2" in said


def test_a_child_s_lines_are_read_without_waiting() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "print('one'); print('two')"], stdout=subprocess.PIPE, text=True
    )
    child = Child("talker", process)
    process.wait()
    found: list[str] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < 2 and time.monotonic() < deadline:
        found += child.new_lines()
    assert found == ["one", "two"]
    child.stop()
