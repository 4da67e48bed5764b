"""The demo leaves no process behind, however it ends."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diffurefill.demo import fleet, processes
from diffurefill.demo.processes import Child, stop_all
from diffurefill.store.base import open_store

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def deaf_child() -> Child:
    """A process that does not end when it is asked to."""
    command, pipe = [sys.executable, "-c", DEAF], subprocess.PIPE
    child = Child("deaf", subprocess.Popen(command, stdout=pipe, text=True))
    assert child.lines.get() == "ready"
    return child


def test_who_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.2)
    children = [deaf_child(), deaf_child()]
    stop_all(children)
    assert [c.process.poll() for c in children] == [-signal.SIGKILL] * 2


def test_a_second_signal_kills_those_that_are_waited_for() -> None:
    children = [deaf_child(), deaf_child()]
    # A job in the background of a shell has no handler of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            stop_all(children)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [c.process.poll() for c in children] == [-signal.SIGKILL] * 2


def test_a_fleet_that_could_not_be_started_whole_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(uri: str, number: int) -> Child:
        raise OSError("no more processes")

    started: list[Child] = []
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(
        fleet, "start_doomed_merger", lambda *_: started.append(deaf_child()) or started[0]
    )
    monkeypatch.setattr(fleet, "start_worker", refused)
    open_store(str(tmp_path), create=True)
    with pytest.raises(OSError, match="no more processes"):
        fleet.DemoFleet(str(tmp_path), lambda line: None).run(8, 1.0)
    assert started[0].process.poll() == -signal.SIGKILL
