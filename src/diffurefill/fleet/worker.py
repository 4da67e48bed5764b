"""A worker: adopt the global, take `local_steps` steps, push the difference, wait for the next.

`Worker.run` is a generator that yields the seconds it wants to wait (0 between local steps and
before every operation on the store), so the same code runs in a process, in a test and in virtual
time. A worker may be killed anywhere: what it had pushed is merged, what it had not is read again
by the slot's next holder.

Rules learned by the seed run: the global *replaces* the weights (keeping local drift made the
model worse in 60 of 63 adoptions), optimiser moments stay, and a worker never merges by itself.
Source: spec fleet.md 5.2 and 5.5, algorithms.md 8.
"""

from __future__ import annotations

import math
import random
import shlex
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from diffurefill.config import UserError
from diffurefill.fleet import protocol
from diffurefill.fleet.lane import WorkerLane
from diffurefill.fleet.log import WorkerLog
from diffurefill.fleet.patience import Patience, Watch
from diffurefill.fleet.records import Contribution, Cursor, State
from diffurefill.fleet.run import Run, Snapshot
from diffurefill.store.base import Busy, Corrupt, NotFound

MAX_UNSOUND = 3
"""Diverged intervals or refused deltas in a row after which a person must look."""
NEVER_ACCEPTED = ("run", "config", "schema", "codec")
"""Reasons that no further training can mend."""
UNSOUND = ("nonfinite", "norm", "cosine", "guard")
"""Reasons that speak against the weights: the moments that led there are dropped."""
PUSH_SECONDS = 30.0
"""What a push is taken to last until one was measured."""


@dataclass
class Interval:
    """Local steps since the last push."""

    steps: int = 0
    tokens: int = 0
    losses: list[Any] = field(default_factory=list)
    """Numbers, or numbers that are still being computed."""
    began: float = 0.0
    """When its first step began, by the worker's clock; before that it means nothing."""


class Learner(Protocol):
    """What a worker trains with. The real one is fleet/learner.py; tests use integers."""

    @property
    def codec(self) -> str: ...

    @property
    def machine(self) -> str:
        """What it trains on, for the log: `cpu`, or the GPU's name."""
        ...

    def adopt(self, weights: Path, state: State, ahead: int) -> dict[str, Any]:
        """Replace the weights; take the state's step and the slot's cursor. Facts to log.

        `ahead` counts steps taken since the last push: with any, their change is kept and the
        global's is added (fleet.adoption = "keep_drift").
        """
        ...

    def step(self, local_step: int) -> dict[str, Any]:
        """One optimiser step. Returns its metrics, `tokens` and `loss` among them.

        A metric may be a number that is still being computed: `float` of it waits.
        """
        ...

    def reset(self) -> None:
        """Forget the optimiser's moments."""
        ...

    def cursor(self) -> Cursor:
        """Where the slot continues after the steps taken since `adopt`."""
        ...

    def save_delta(self, base: Path, dest: Path) -> float:
        """Write the payload; returns the norm of the difference (not finite if it diverged)."""
        ...

    def finish(self) -> dict[str, Any]:
        """Facts to log about the interval just completed: the drift probe, memory."""
        ...

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        """A downlink update's arithmetic; see averager.Averager."""
        ...


class Worker:
    """One incarnation of worker number `number`, which reads data slot `number`."""

    def __init__(
        self,
        run: Run,
        number: int,
        learner: Learner,
        *,
        session_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        report: Callable[[str], None] = print,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """`session_seconds`: how long this process may live; it pushes early before its end."""
        if not 0 <= number < run.config.data.num_slots:
            raise UserError(
                f"worker {number} has no data slot: this run has slots 0 to "
                f"{run.config.data.num_slots - 1}"
            )
        self._run, self._learner, self._clock, self._report = run, learner, clock, report
        self.number, self.incarnation = number, new_id()
        self._io = Patience(
            lambda line: report(f"worker {number}: {line}"), random.Random(self.incarnation)
        )
        self._log = WorkerLog(number, self.incarnation, report, wall_clock)
        self._lane = WorkerLane(run, number, self.incarnation, self._log, self._io, clock)
        self._ends_at = clock() + session_seconds
        self._push_seconds = PUSH_SECONDS
        self._seq = self._num_merged = self._num_unsound = self._num_late = 0
        # A merger that lives moves its lane within its lease.
        self._merger = Watch(2 * run.config.fleet.lease_seconds, clock)
        self._moment_steps = 0
        """Steps since the optimiser's moments were empty."""
        self._pending: Contribution | None = None
        self._interval = Interval()
        self._pushed_end: Cursor | None = None
        """Where this process's last push ended, and what it drifts from."""

    # --- the loop --------------------------------------------------------------------------------

    def run(self, rounds: int | None = None) -> Iterator[float]:
        """Work for `rounds` merged contributions (None: until killed); yields seconds to wait."""
        self._pending = yield from self._lane.register(self._learner.machine)
        waiting_since = self._clock()
        while True:
            now = yield from self._io(self._run.snapshot)
            waited = self._clock() - waiting_since
            pending = self._is_pending(now.state)
            if self._session_is_over():
                self._report(f"worker {self.number}: the session ends; {self._what_counts()}")
                return
            if pending:
                yield from self._wait(now, waited)
            elif rounds is not None and self._num_merged >= rounds:
                self._report(f"worker {self.number}: {self._num_merged} contributions merged, done")
                return
            else:
                yield from self._work(now, waited)
                waiting_since = self._clock()

    def _wait(self, now: Snapshot, waited: float) -> Iterator[float]:
        """A pushed contribution is not decided yet: show signs of life, or keep drifting."""
        state = now.state
        self._watch_merger(now.version.id)
        if self._lane.log_is_due():
            self._log.note("wait", {"gen": state.gen, "wait_seconds": waited}, quiet=True)
        yield from self._lane.beat(len(state.live))
        fleet, until = self._run.config.fleet, self._clock() + self._run.config.fleet.poll_seconds
        ours = self._pending is not None and self._pending.incarnation == self.incarnation
        if fleet.adoption == "keep_drift" and ours:
            while self._interval.steps < fleet.local_steps and self._clock() < until:
                yield from self._step(state)
        yield max(0.0, until - self._clock())

    def _watch_merger(self, main: str) -> None:
        if silent := self._merger.silence(main):
            self._report(
                f"worker {self.number}: no sign of a merger for {silent:.0f} s, and what was "
                "pushed waits for one: is it running? "
                f"`diffurefill merger {shlex.quote(self._run.store.uri)}`"
            )

    def _work(self, now: Snapshot, waited: float) -> Iterator[float]:
        """Adopt the global and train on it; push unless a newer global appears meanwhile.

        A partial interval is dropped: its rows are read again, and the fleet starts together.
        """
        began = self._clock() - waited
        try:
            base = yield from self._adopt(now, waited)
        except NotFound:  # a newer global has replaced it, and the store was compacted
            yield self._run.config.fleet.poll_seconds
            return
        if (yield from self._train(now.state)):
            wall = self._interval.tokens / max(self._clock() - began, 1e-9)
            yield from self._push(now.state, base, {"wall_tokens_per_second": wall})
        self._interval = Interval()

    # --- what became of the last push ------------------------------------------------------------

    def _is_pending(self, state: State) -> bool:
        """Whether this lane holds a contribution to `state`'s global that is not decided yet.

        It may be an earlier incarnation's: then this process waits for the merger instead of
        training on the same documents twice.
        """
        c, fleet = self._pending, self._run.config.fleet
        if c is None:
            return False
        verdict = protocol.judge(c, state, self._lane.registration, [c.codec], fleet.max_staleness)
        if verdict == "eligible":
            return True
        self._pending = None
        about = {"gen": c.base_gen, "seq": c.seq, "lost_steps": c.steps}
        if verdict != "decided":  # the next global was made without it
            self._drop_drift()
            self._note_late({**about, "newer_gen": state.gen})
        elif reason := state.roster[str(c.worker)].reason:
            self._drop_drift()
            self._log.note("rejected", {**about, "reason": reason})
            self._heed(reason)
        elif c.incarnation == self.incarnation:
            self._num_merged += 1
            self._num_unsound = self._num_late = 0
        return False

    def _drop_drift(self) -> None:
        self._interval = Interval()

    def _note_late(self, facts: dict[str, Any]) -> None:
        self._num_late += 1
        self._log.note("late", facts)
        if self._num_late > 1:
            self._report(
                f"worker {self.number}: late {self._num_late} times in a row: this machine is too "
                f"slow for the fleet's fleet.grace_seconds ({self._run.config.fleet.grace_seconds})"
            )

    def _heed(self, reason: str) -> None:
        """Stop where a person must help; start from fresh moments where the weights were bad."""
        if reason in NEVER_ACCEPTED:
            raise UserError(
                f"the merger rejects worker {self.number}'s contributions ({reason}): run the "
                "version of diffurefill that the merger runs"
            )
        if reason in UNSOUND:
            self._drop_moments(f"contributions were rejected ({reason})")

    def _drop_moments(self, what: str) -> None:
        self._num_unsound += 1
        if self._num_unsound >= MAX_UNSOUND:
            raise UserError(
                f"worker {self.number}: {what} {self._num_unsound} times in a row; look at this "
                "machine first, and at the other workers' losses; if all diverge, make a run with "
                "a lower optim.peak_lr"
            )
        self._learner.reset()
        self._moment_steps = 0

    # --- an interval -----------------------------------------------------------------------------

    def _adopt(self, now: Snapshot, waited: float) -> Generator[float, None, Path]:
        began, state = self._clock(), now.state
        base = yield from self._io(lambda: self._run.fetch_global(now, self._learner.apply_update))
        seconds, size = self._clock() - began, state.global_weights.size
        if state.cursor(self.number) != self._pushed_end:  # what was pushed was rolled back
            self._drop_drift()
        facts = self._learner.adopt(base, state, self._interval.steps)
        self._run.forget(keep={state.global_weights.sha256})
        waits = {"wait_seconds": waited, "download_seconds": seconds, "bytes": size}
        self._log.note("adopt", {"gen": state.gen, "step": state.step, **facts, **waits})
        return base

    def _train(self, state: State) -> Generator[float, None, bool]:
        """Steps up to `local_steps`, or as many as the session allows; whether to push them."""
        fleet, interval = self._run.config.fleet, self._interval
        began = polled = self._clock()
        first = interval.steps
        while interval.steps < fleet.local_steps:
            yield from self._step(state)
            pace = (self._clock() - began) / (interval.steps - first)
            ends = self._session_ends(2.0 * pace + 2.0 * self._push_seconds)
            last = ends or interval.steps == fleet.local_steps
            if last or self._clock() - polled >= fleet.training_poll_seconds:
                polled = self._clock()
                yield from self._lane.beat(len(state.live))
                if (yield from self._is_overtaken(state)):
                    return False
            if ends:
                return self._is_worth_pushing(state)
        return True

    def _step(self, state: State) -> Iterator[float]:
        interval, settings = self._interval, self._run.config
        if interval.steps == 0:  # which may be while an earlier push is waited for
            interval.began = self._clock()
        metrics = self._learner.step(interval.steps)
        interval.steps += 1
        self._moment_steps += 1
        interval.tokens += metrics["tokens"]
        interval.losses.append(metrics["loss"])
        yield 0.0
        if interval.steps % settings.train.log_every_steps == 0:
            progress = {"local_step": interval.steps, "of": settings.fleet.local_steps}
            read = {name: _read(value) for name, value in metrics.items()}
            rate = interval.tokens / max(self._clock() - interval.began, 1e-9)
            facts = {"gen": state.gen, **progress, **read, "tokens_per_second": rate}
            self._log.note("train", facts)

    def _is_overtaken(self, state: State) -> Generator[float, None, bool]:
        """Whether a newer global makes this interval worthless. Asked once: a store that does not
        answer must not stop the training."""
        yield 0.0
        try:
            newer = self._run.snapshot().state
        except (Busy, Corrupt):
            return False
        steps, fleet = self._interval.steps, self._run.config.fleet
        if newer.gen <= state.gen or protocol.may_finish(steps, newer.gen - state.gen, fleet):
            return False
        lost = {"newer_gen": newer.gen, "lost_steps": steps}
        self._log.note("dropped", {"gen": state.gen, **lost})
        return True

    # --- the session's end -----------------------------------------------------------------------

    def _session_ends(self, margin: float) -> bool:
        return self._clock() + margin >= self._ends_at

    def _session_is_over(self) -> bool:
        """Whether no time is left for a push; then there is none for training either."""
        return self._session_ends(self._push_seconds)

    def _what_counts(self) -> str:
        if self._seq:
            return "what it pushed will count"
        fewest = self._run.config.fleet.min_partial_steps
        return (
            f"nothing was pushed: that takes {fewest} steps (fleet.min_partial_steps) and about "
            f"{2 * self._push_seconds:.0f} s for the push"
        )

    def _is_worth_pushing(self, state: State) -> bool:
        steps = self._interval.steps
        worth = steps >= self._run.config.fleet.min_partial_steps
        self._log.note("session_ends", {"gen": state.gen, "steps": steps, "pushed": worth})
        self._ends_at = self._clock()
        return worth

    # --- pushing ---------------------------------------------------------------------------------

    def _push(self, state: State, base: Path, facts: dict[str, Any]) -> Iterator[float]:
        """One publish on this worker's own lane: payload, manifest and log together."""
        began, interval = self._clock(), self._interval
        facts["tokens_per_second"] = interval.tokens / max(began - interval.began, 1e-9)
        payload = self._run.cache / f"{self.incarnation}.delta"
        norm = self._learner.save_delta(base, payload)
        facts["encode_seconds"] = self._clock() - began
        facts |= {"machine": self._learner.machine, "store_errors": self._io.take_failed()}
        if not math.isfinite(norm):
            self._log.note("nonfinite", {"gen": state.gen, **self._learner.finish()})
            self._drop_moments("the weights were not finite")
            return
        ref = yield from self._io(lambda: self._run.store.stage(payload))
        self._seq += 1
        c = Contribution(
            run_id=state.run_id,
            worker=self.number,
            incarnation=self.incarnation,
            seq=self._seq,
            base_gen=state.gen,
            base_sha256=state.global_weights.sha256,
            config_sha=state.config_sha,
            schema_sha=state.schema_sha,
            codec=self._learner.codec,
            payload=ref,
            steps=interval.steps,
            tokens=interval.tokens,
            cursor_start=state.cursor(self.number),
            cursor_end=self._learner.cursor(),
            moment_steps=self._moment_steps - interval.steps,
            delta_norm=norm,
            loss_mean=sum(map(float, interval.losses)) / len(interval.losses),
        )
        about = {"gen": state.gen, "seq": c.seq, "steps": c.steps, "tokens": c.tokens}
        measured = {"loss_mean": c.loss_mean, "delta_norm": norm}
        self._log.note("push", {**about, **measured, **facts, **self._learner.finish()})
        yield from self._lane.push(c, state)
        self._pending, self._pushed_end = c, c.cursor_end
        payload.unlink(missing_ok=True)
        self._push_seconds = seconds = self._clock() - began
        self._log.note("pushed", {"gen": c.base_gen, "bytes": ref.size, "upload_seconds": seconds})


def _read(value: Any) -> Any:
    """A metric as the log takes it."""
    return value if isinstance(value, (int, float, str)) else float(value)
