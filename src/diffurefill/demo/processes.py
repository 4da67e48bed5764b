"""The demo's real processes: started, read line by line, killed by pid."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from diffurefill.fleet.records import State

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
"""Two workers on two cores: a second thread each would only spin."""

STOP_SECONDS = 10.0
"""What a process may take to end when it is asked to; it removes its local copies meanwhile."""


@dataclass
class Child:
    """A process whose output lines arrive in `lines` (None at the end)."""

    name: str
    process: subprocess.Popen[str]
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    @property
    def pid(self) -> int:
        return self.process.pid

    def new_lines(self) -> list[str]:
        found = []
        while True:
            try:
                line = self.lines.get_nowait()
            except queue.Empty:
                return found
            if line is not None:
                found.append(line)

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        self.process.kill()
        self._ended()

    def stop(self) -> None:
        """End it without ceremony; a worker or merger needs none."""
        stop_all([self])

    def _ended(self) -> None:
        """Bounded: a process of its own may outlive it and hold its output open."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)


def stop_all(children: Sequence[Child]) -> None:
    """End them; what is there after `STOP_SECONDS`, or at a signal while we wait, is killed."""
    try:
        for child in children:
            child.process.terminate()
        ends_at = time.monotonic() + STOP_SECONDS
        for child in children:
            child.process.wait(max(0.0, ends_at - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:  # all of them before any wait
            child.process.kill()
        for child in children:
            child.kill()


def start_worker(store: str, number: int) -> Child:
    return _start(
        f"worker {number}",
        ["-m", "diffurefill", "worker", store, "--worker", str(number), "--threads", "1"],
    )


def start_merger(store: str) -> Child:
    return _start("merger", ["-m", "diffurefill", "merger", store])


def start_doomed_merger(store: str, generation: int) -> Child:
    """A merger that is killed when generation `generation` is averaged and not yet published."""
    code = "import sys; from diffurefill.demo.processes import doomed_merger as m; m(*sys.argv[1:])"
    return _start("merger", ["-c", code, store, str(generation)])


def doomed_merger(store: str, generation: str) -> None:
    """Runs in the child. It sends SIGKILL to itself, so that the moment is exact."""
    from diffurefill.fleet import start

    def die(event: str, state: State) -> None:
        if event == "averaged" and state.gen == int(generation):
            print(f"merger: averaged generation {state.gen}, about to publish it", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    start.start_merger(store, None, 1, True, lambda line: print(line, flush=True), on_event=die)


def _start(name: str, arguments: list[str]) -> Child:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ONE_THREAD},
    )
    return Child(name, process)
