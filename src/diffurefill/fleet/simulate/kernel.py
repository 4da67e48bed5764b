"""Virtual time: processes are generators, one event heap, one seeded source of chance.

A process yields the seconds it wants to wait. Between two yields it acts at once; what its store
operations and training steps cost is added to the wait. At every yield the `Nemesis` may kill the
process, stop it for a while or hold it up; inside a step a store operation may raise `Killed`.
Everything that happens is folded into a running sha256: same seed, same trace, on any machine.
Nothing here knows of stores, models or rounds. Source: spec fleet.md 4.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from diffurefill.config import UserError
from diffurefill.store.base import StoreError

Body = Iterator[float]


class Killed(BaseException):
    """The process dies here. Not an Exception: nothing in the product may catch it."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What things take, in virtual seconds. Weights are `model_bytes` whatever a test puts there,
    so that no time depends on the length of an id or of a log line."""

    latency_seconds: float = 0.5
    """One call to the hub, in the mean; each draws its own between a half and one and a half."""
    upload_bytes_per_second: float = 100e6
    download_bytes_per_second: float = 100e6
    model_bytes: float = 500e6
    payload_bytes: float = 500e6
    step_seconds: float = 5.0
    """One local step of a worker of speed 1."""

    def bytes_of(self, content: bytes) -> float:
        """What a staged file weighs: contributions of the simulator begin with their delta."""
        return self.payload_bytes if content.startswith(b'{"delta"') else self.model_bytes


@dataclass(eq=False)
class Process:
    """One launch of an actor. `clock` is its own: monotonic, with its own zero and rate."""

    name: str
    kernel: Kernel
    offset: float
    rate: float = 1.0
    speed: float = 1.0
    body: Body | None = None
    spent: float = 0.0
    """Cost of the current step so far, seconds."""
    ending: str | None = None
    """How it ended: `done`, `killed`, or the error's class and text; None while it lives."""
    paused_until: float = 0.0
    interrupted: bool = False
    """Whether a person pressed Ctrl-C: its body looks at it after every step."""

    @property
    def alive(self) -> bool:
        return self.ending is None

    def clock(self) -> float:
        return self.offset + (self.kernel.now + self.spent) * self.rate

    def spend(self, seconds: float) -> None:
        self.spent += seconds


class Nemesis(Protocol):
    """Decides what befalls a process between two of its steps."""

    def after_step(self, process: Process, wait: float) -> float | None:
        """The wait that takes place, or None to kill the process."""
        ...


class Mercy:
    """Nothing befalls anybody."""

    def after_step(self, process: Process, wait: float) -> float | None:
        return wait


MIN_STEP_SECONDS = 1e-3
"""A step takes at least so long: a process that only yields 0 cannot stop time."""


@dataclass(eq=False)
class Kernel:
    """`now` is the time nobody inside the simulation can read."""

    seed: int
    nemesis: Nemesis = field(default_factory=Mercy)
    keep_trace: bool = False
    on_end: Callable[[Process], None] = lambda process: None
    now: float = 0.0
    events: int = 0
    trace: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    """Every launch, in order; ended ones stay."""
    bugs: list[str] = field(default_factory=list)
    """Exceptions that no process may end with."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._digest = hashlib.sha256()

    # --- what is to happen -----------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do `action` at `time`; of two at the same time the one asked for first."""
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, action))

    def launch(self, name: str, make: Callable[[Process], Body], speed: float = 1.0) -> Process:
        """Start a process; `make(process)` is called in its first step and gives its body."""
        process = Process(name, self, offset=self.chance.uniform(0.0, 1e6), speed=speed)
        process.body = _started(process, make)
        self.processes.append(process)
        self.note(name, "launch")
        self._wake(process, 0.0)
        return process

    def kill(self, process: Process) -> None:
        """SIGKILL between two of its steps. Nothing it held survives but the hub."""
        if process.alive:
            self._end(process, "killed")

    def pause(self, process: Process, seconds: float) -> None:
        """SIGSTOP; its clock goes on."""
        process.paused_until = self.now + seconds
        self.note(process.name, "pause", f"{seconds:.3f}")

    # --- time ------------------------------------------------------------------------------------

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let things happen until `until` or `done()`, asked after every event; whether done."""
        while not done():
            if not self._heap or self._heap[0][0] > until:
                self.now = max(self.now, until)
                return done()
            time, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, time)
            self.events += 1
            action()
        return True

    def step(self, process: Process) -> float | None:
        """One step of `process`; the seconds until its next one, None when it has ended."""
        process.spent = 0.0
        assert process.body is not None
        try:
            wait = next(process.body)
        except StopIteration:
            return self._end(process, "done")
        except Killed:
            return self._end(process, "killed")
        except (UserError, StoreError) as error:
            return self._end(process, type(error).__name__, str(error))
        except Exception as error:  # a bug of the product, which must not end the simulation
            self.bugs.append(f"{process.name} raised {type(error).__name__}: {error}")
            return self._end(process, type(error).__name__, str(error))
        return max(process.spent + wait, MIN_STEP_SECONDS)

    def _wake(self, process: Process, seconds: float) -> None:
        self.at(self.now + seconds, lambda: self._go_on(process))

    def _go_on(self, process: Process) -> None:
        if not process.alive:
            return
        if process.paused_until > self.now:
            self._wake(process, process.paused_until - self.now)
            return
        wait = self.step(process)
        if wait is None:
            return
        suffered = self.nemesis.after_step(process, wait)
        if suffered is None:
            self.kill(process)
        else:
            self._wake(process, suffered)

    def _end(self, process: Process, how: str, text: str = "") -> None:
        process.ending = f"{how}: {text}" if text else how
        body, process.body = process.body, None
        self.note(process.name, "end", how)
        if isinstance(body, Generator):
            body.close()
        self.on_end(process)

    # --- the trace -------------------------------------------------------------------------------

    def note(self, *facts: object) -> None:
        """Fold one event into the trace. Facts must be the same in every run of the seed: no ids
        of incarnations, no digests of files that hold one."""
        line = f"{self.now:.6f} {' '.join(map(str, facts))}"
        self._digest.update(line.encode())
        if self.keep_trace:
            self.trace.append(line)

    @property
    def trace_hash(self) -> str:
        return self._digest.hexdigest()


def _started(process: Process, make: Callable[[Process], Body]) -> Body:
    yield from make(process)
