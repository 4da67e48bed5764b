"""The demo's fleet: one merger and two workers as real processes, and the kills.

Watches the store for new generations and the processes' own lines for what they are doing, kills a
worker inside an interval and a merger between averaging and publishing, and starts each again.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diffurefill.config import UserError
from diffurefill.demo.processes import (
    Child,
    start_doomed_merger,
    start_merger,
    start_worker,
    stop_all,
)
from diffurefill.fleet.records import State
from diffurefill.fleet.status import latest_state
from diffurefill.store.base import open_store

WORKER_DIES = 1
WORKER_DIES_IN = 2
"""The generation whose interval the killed worker was in."""
MERGER_DIES_BEFORE = 5
"""The generation that was averaged and not published when the merger was killed."""
MIN_GENERATIONS = 8
WATCH_SECONDS = 0.3
TOLD = ("begins at", "rejected", "dropped", "found", "error")
"""Lines of the processes that the demo repeats; the rest is in their logs."""


@dataclass
class FleetStory:
    """What happened: a row per generation, and the kills."""

    generations: list[dict[str, Any]] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)


class DemoFleet:
    """Runs the fleet on the store at `uri` until `generations` exist or `minutes` are over."""

    def __init__(self, uri: str, say: Callable[[str], None]) -> None:
        self._uri, self._store, self._say = uri, open_store(uri), say
        self.story = FleetStory()
        self._began = time.monotonic()
        self._gen = 0
        self._started: list[Child] = []  # all of them, so that none outlives `run`
        self._workers: dict[int, Child] = {}

    def run(self, generations: int, minutes: float) -> FleetStory:
        generations = max(generations, MIN_GENERATIONS)
        try:
            self._start()
            while not self._finished(generations, minutes * 60):
                time.sleep(WATCH_SECONDS)
                self._look()
        finally:
            stop_all(self._started)
        return self.story

    def _start(self) -> None:
        self._merger = self._noted(start_doomed_merger(self._uri, MERGER_DIES_BEFORE))
        for number in (0, 1):
            self._workers[number] = self._noted(start_worker(self._uri, number))
        self._say(f"started {', '.join(f'{c.name} (pid {c.pid})' for c in self._started)}")

    def _noted(self, child: Child) -> Child:
        self._started.append(child)
        return child

    def _finished(self, generations: int, seconds: float) -> bool:
        """Enough, and the EMA of the last generation is published too."""
        state = latest_state(self._store)
        if state.gen > self._gen:
            self._note_generation(state)
        in_time = time.monotonic() - self._began < seconds
        enough = state.gen >= (generations if in_time else MIN_GENERATIONS)
        return enough and state.ema is not None and state.ema.gen == state.gen

    def _note_generation(self, state: State) -> None:
        self._gen = state.gen
        row = {
            "generation": state.gen,
            "seconds": round(time.monotonic() - self._began, 1),
            "workers": [c.worker for c in state.accepted],
            "step": state.step,
            "tokens": state.tokens,
            "train_loss": sum(c.loss_mean for c in state.accepted) / len(state.accepted),
            "killed": "",
        }
        self.story.generations.append(row)
        self._say(
            f"generation {state.gen}: workers {', '.join(map(str, row['workers']))}, "
            f"step {state.step}, {state.tokens:,} tokens, training loss {row['train_loss']:.2f}"
        )

    def _look(self) -> None:
        for number, worker in list(self._workers.items()):
            self._look_at_worker(number, worker)
        self._look_at_merger()

    def _look_at_worker(self, number: int, worker: Child) -> None:
        lines = worker.new_lines()
        self._tell(lines)
        if worker.process.poll() is not None:
            raise _stopped_by_itself(worker, lines)
        inside = [s for s in lines if f"train gen {WORKER_DIES_IN}, local step" in s]
        if number != WORKER_DIES or not inside or self._has_killed("worker"):
            return
        worker.kill()
        step, steps = re.findall(r"local step (\d+), of (\d+)", inside[-1])[0]
        where = f"after {step} of {steps} local steps of generation {WORKER_DIES_IN}"
        self._workers[number] = self._noted(start_worker(self._uri, number))
        self._note_kill("worker", worker.name, worker, self._workers[number], where)

    def _look_at_merger(self) -> None:
        lines = self._merger.new_lines()
        self._tell(lines)
        died_of = self._merger.process.poll()
        if died_of is None:
            return
        if died_of != -signal.SIGKILL or self._has_killed("merger"):
            raise _stopped_by_itself(self._merger, lines)
        dead, self._merger = self._merger, self._noted(start_merger(self._uri))
        where = f"between averaging and publishing generation {MERGER_DIES_BEFORE}"
        self._note_kill("merger", "the merger", dead, self._merger, where)

    def _note_kill(self, kind: str, what: str, dead: Child, heir: Child, where: str) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        self.story.kills.append(
            {"kind": kind, "what": f"{what} {where}", "generation": self._gen, "seconds": seconds}
        )
        if self.story.generations:
            self.story.generations[-1]["killed"] = what
        self._say(f"KILLED {what} (pid {dead.pid}, SIGKILL) {where}; started pid {heir.pid}")

    def _has_killed(self, kind: str) -> bool:
        return any(k["kind"] == kind for k in self.story.kills)

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            if any(word in line for word in TOLD):
                self._say(f"    {line}")


def _stopped_by_itself(child: Child, lines: list[str]) -> UserError:
    child.stop()
    last = " | ".join([*lines, *child.new_lines()][-3:])
    return UserError(f"{child.name} stopped by itself, the demo ends: {last}")
