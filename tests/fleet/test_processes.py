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
from diffurefill.fleet.status import latest_state
from diffurefill.store.base import open_store
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


def wait_for_generation(store: str, gen: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while latest_state(open_store(store)).gen < gen:
        assert time.monotonic() < deadline, f"generation {gen} never came"
        time.sleep(0.05)


def test_a_worker_and_a_merger_are_killed_and_nothing_is_lost(
    store: str, start: Callable[..., subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    doomed = start_doomed_merger(store, 2)
    first = start("worker", store, "--worker", "0")
    start("worker", store, "--worker", "1")
    try:
        wait_for_generation(store, 1)
        first.send_signal(signal.SIGKILL)
        heir = start("worker", store, "--worker", "0")
        assert doomed.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        assert latest_state(open_store(store)).gen == 1, "it died before it published"
    finally:
        doomed.stop()
    start("merger", store)
    wait_for_generation(store, 5)
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
    deadline = time.monotonic() + PATIENCE_SECONDS
    while open_store(store).head("w-02") is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
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
