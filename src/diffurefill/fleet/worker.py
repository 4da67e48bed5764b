"""A worker: adopt the global, take `local_steps` steps, push the difference, wait for the next.

`Worker.run` is a generator that yields the seconds it wants to wait (0 between local steps), so
the same code runs in a process, in a test and in virtual time. A worker may be killed anywhere:
what it had pushed is merged, what it had not is read again by the slot's next holder.

Rules learned by the seed run: the global *replaces* the weights (keeping local drift made the
model worse in 60 of 63 adoptions), optimiser moments stay, and a worker never merges by itself.
Source: spec fleet.md 5.2 and 5.5, algorithms.md 8.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from diffurefill.config import UserError
from diffurefill.fleet import protocol
from diffurefill.fleet.log import WorkerLog
from diffurefill.fleet.protocol import Contribution, Registration, State
from diffurefill.fleet.run import Fenced, Run
from diffurefill.store.base import (
    Busy,
    Change,
    Conflict,
    Version,
    dump_json,
    publish_surely,
    read_json,
)

MAX_DIVERGED = 3
NEVER_ACCEPTED = ("run", "config", "schema", "codec")
"""Reasons that no further training can mend."""


@dataclass(frozen=True)
class Trained:
    """A completed interval."""

    tokens: int
    loss_mean: float
    facts: dict[str, Any]


class Learner(Protocol):
    """What a worker trains with. The real one is fleet/learner.py; tests use integers."""

    codec: str
    machine: str
    """What it trains on, for the log: `cpu`, or the GPU's name."""

    def adopt(self, weights: Path, state: State) -> dict[str, Any]:
        """Replace the weights; take the state's step and the slot's cursor. Facts to log."""
        ...

    def step(self, local_step: int) -> dict[str, Any]:
        """One optimiser step. Returns its metrics, `tokens` and `loss` among them."""
        ...

    def reset(self) -> None:
        """Forget the optimiser's moments."""
        ...

    def cursor(self) -> dict[str, int]:
        """Where the slot continues after the steps taken since `adopt`."""
        ...

    def save_delta(self, base: Path, dest: Path) -> float:
        """Write the payload; returns the norm of the difference (not finite if it diverged)."""
        ...

    def finish(self) -> dict[str, Any]:
        """Facts to log about the interval just completed: the drift probe, memory."""
        ...


class Worker:
    """One incarnation of worker number `number`, which reads data slot `number`."""

    def __init__(
        self,
        run: Run,
        number: int,
        learner: Learner,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = print,
    ) -> None:
        if not 0 <= number < run.config.data.num_slots:
            raise UserError(
                f"worker {number} has no data slot: this run has slots 0 to "
                f"{run.config.data.num_slots - 1}"
            )
        self._run, self._learner, self._clock, self._report = run, learner, clock, report
        self.number = number
        self.lane = protocol.lane_of(number)
        self._paths = protocol.worker_paths(number)
        self.incarnation = uuid.uuid4().hex
        self._seq = self._num_merged = 0
        self._diverged = 0
        self._log = WorkerLog(number, self.incarnation, report)
        self._pending: Contribution | None = None
        self._pushed_log_at = clock()
        self._version = self._register()

    # --- the loop --------------------------------------------------------------------------------

    def run(self, rounds: int | None = None) -> Iterator[float]:
        """Work for `rounds` merged contributions (None: until killed); yields seconds to wait."""
        poll, waiting_since = self._run.config.fleet.poll_seconds, self._clock()
        while True:
            state = self._run.snapshot().state
            if self._is_pending(state):
                self._beat("wait", gen=state.gen, wait_seconds=self._clock() - waiting_since)
                yield poll
                continue
            if rounds is not None and self._num_merged >= rounds:
                self._report(f"worker {self.number}: {self._num_merged} contributions merged, done")
                return
            yield from self._interval(state, self._clock() - waiting_since)
            waiting_since = self._clock()

    def _is_pending(self, state: State) -> bool:
        """Whether this lane holds a contribution to `state`'s global that is not decided yet.

        It may be an earlier incarnation's: then this process waits for the merger instead of
        training on the same documents twice.
        """
        c = self._pending
        if c is None:
            return False
        verdict = protocol.judge(c, state, self._registration, self._learner.codec)
        if verdict == "eligible":
            return True
        self._pending = None
        about = {"gen": c.base_gen, "seq": c.seq, "lost_steps": c.steps}
        if verdict != "decided":  # the next global was made without it
            self._log.note("late", {**about, "newer_gen": state.gen})
        elif reason := state.roster[str(c.worker)].reason:
            self._log.note("rejected", {**about, "reason": reason})
            if reason in NEVER_ACCEPTED:
                raise UserError(
                    f"the merger rejects worker {self.number}'s contributions ({reason}): run the "
                    "version of diffurefill that the merger runs"
                )
        elif c.incarnation == self.incarnation:
            self._num_merged += 1
        return False

    def _interval(self, state: State, waited: float) -> Iterator[float]:
        """Adopt `state`'s global and train on it; push unless a newer global appears meanwhile.

        A partial interval is dropped: its rows are read again, and the fleet starts together.
        """
        began = self._clock() - waited
        base = self._adopt(state, waited)
        trained = yield from self._train(state)
        if trained is not None:
            wall = trained.tokens / max(self._clock() - began, 1e-9)
            trained.facts["wall_tokens_per_second"] = wall
            yield from self._push(state, base, trained)

    def _adopt(self, state: State, waited: float) -> Path:
        began = self._clock()
        base = self._run.fetch(state.global_weights)
        seconds, size = self._clock() - began, state.global_weights.size
        facts = self._learner.adopt(base, state)
        self._run.forget(keep={state.global_weights.sha256})
        waits = {"wait_seconds": waited, "download_seconds": seconds, "bytes": size}
        self._log.note("adopt", {"gen": state.gen, "step": state.step, **facts, **waits})
        return base

    def _train(self, state: State) -> Generator[float, None, Trained | None]:
        """`local_steps` steps; None when a newer global appeared."""
        settings, began = self._run.config, self._clock()
        polled, tokens, losses = began, 0, []
        for local_step in range(settings.fleet.local_steps):
            metrics = self._learner.step(local_step)
            tokens += metrics["tokens"]
            losses.append(metrics["loss"])
            yield 0.0
            if (local_step + 1) % settings.train.log_every_steps == 0:
                progress = {"local_step": local_step + 1, "of": settings.fleet.local_steps}
                self._log.note("train", {"gen": state.gen, **progress, **metrics})
            last = local_step + 1 == settings.fleet.local_steps
            if last or self._clock() - polled >= settings.fleet.poll_seconds:
                polled = self._clock()
                self._beat()
                newer = self._run.snapshot().state
                if newer.global_weights != state.global_weights:
                    lost = {"newer_gen": newer.gen, "lost_steps": local_step + 1}
                    self._log.note("dropped", {"gen": state.gen, **lost})
                    return None
        rate = tokens / max(self._clock() - began, 1e-9)
        return Trained(tokens, sum(losses) / len(losses), {"tokens_per_second": rate})

    def _push(self, state: State, base: Path, trained: Trained) -> Iterator[float]:
        """One publish on this worker's own lane: payload, manifest and log together."""
        began = self._clock()
        payload = self._run.cache / f"{self.incarnation}.delta"
        norm = self._learner.save_delta(base, payload)
        if not math.isfinite(norm):
            self._restart_diverged(state)
            return
        self._diverged = 0
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
            payload=self._run.store.stage(payload),
            steps=self._run.config.fleet.local_steps,
            tokens=trained.tokens,
            cursor_start=state.cursor(self.number),
            cursor_end=self._learner.cursor(),
            delta_norm=norm,
            loss_mean=trained.loss_mean,
        )
        facts = {"seq": c.seq, "tokens": c.tokens, "loss_mean": c.loss_mean, "delta_norm": norm}
        self._log.note(
            "push", {"gen": state.gen, **facts, **trained.facts, **self._learner.finish()}
        )
        changes: dict[str, Change] = {
            self._paths.manifest: dump_json(protocol.to_json(c)),
            self._paths.payload: c.payload,
        }
        while True:
            try:
                self._publish(changes)
                break
            except Busy as busy:
                yield busy.retry_after
        self._pending = c
        payload.unlink(missing_ok=True)
        seconds = self._clock() - began
        self._log.note(
            "pushed", {"gen": state.gen, "bytes": c.payload.size, "upload_seconds": seconds}
        )

    def _restart_diverged(self, state: State) -> None:
        """Weights that are not finite are never pushed: drop them and the moments, try again."""
        self._diverged += 1
        self._log.note("nonfinite", {"gen": state.gen, "times_in_a_row": self._diverged})
        if self._diverged >= MAX_DIVERGED:
            raise UserError(
                f"worker {self.number}: the weights were not finite {self._diverged} times in a "
                "row; make a run with a lower optim.peak_lr"
            )
        self._learner.reset()

    # --- the lane --------------------------------------------------------------------------------

    def _register(self) -> Version:
        """Take the lane for this incarnation, leaving an unmerged contribution untouched."""
        store = self._run.store
        head = store.head(self.lane)
        found = "an empty lane"
        if head is not None:
            before = read_json(store, head, self._paths.registration)["incarnation"]
            found = f"the lane of incarnation {before[:8]}"
            if self._paths.manifest in head.files:
                manifest = read_json(store, head, self._paths.manifest)
                self._pending = protocol.contribution_from_json(manifest)
                if self._pending.base_gen == self._run.snapshot().state.gen:
                    found += f" and its contribution to generation {self._pending.base_gen}, "
                    found += "not merged yet: waiting for the merger"
            if self._paths.log in head.files:
                self._log.continue_from(store.read(head.ref(self._paths.log)))
        self._registration = Registration(
            worker=self.number,
            incarnation=self.incarnation,
            inherited=self._pending.incarnation if self._pending else None,
        )
        self._log.note("register", {"found": found, "machine": self._learner.machine})
        try:
            return publish_surely(
                store,
                self.lane,
                {
                    self._paths.registration: dump_json(protocol.to_json(self._registration)),
                    self._paths.log: self._log.content(),
                },
                expect=head,
            )
        except Conflict:
            raise Fenced(
                f"worker {self.number} was started twice at the same moment: the other one has "
                "its lane; start this one with another --worker number"
            ) from None

    def _publish(self, changes: dict[str, Change]) -> None:
        try:
            self._version = publish_surely(
                self._run.store,
                self.lane,
                {**changes, self._paths.log: self._log.content()},
                expect=self._version,
            )
        except Conflict:
            raise Fenced(
                f"another process took over worker {self.number}; this one (incarnation "
                f"{self.incarnation[:8]}) stops. Give every worker its own --worker number"
            ) from None
        self._pushed_log_at = self._clock()

    def _beat(self, phase: str = "", **facts: Any) -> None:
        """Push the log alone when due: liveness is read from pushed logs, never from pings."""
        if self._clock() - self._pushed_log_at < self._run.config.fleet.log_seconds:
            return
        if phase:
            self._log.note(phase, facts, quiet=True)
        with contextlib.suppress(Busy):  # the next beat carries these lines
            self._publish({})
