"""The merger: claim the run, collect contributions, average them, publish the next global.

It may be killed at any instruction. Nothing durable lives only here: a new merger claims the next
epoch, finishes a side average the old one left out, merges what workers had pushed, and goes on.
Of two mergers alive only the newer can publish: every publish is a compare-and-swap on lane
`main`, and the older one finds that the head has moved and stops.

`Merger.run` is a generator that yields the seconds it wants to wait; see worker.py for why.
Source: spec fleet.md 5.2-5.4, algorithms.md 3.5.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from diffurefill.fleet import protocol
from diffurefill.fleet.protocol import Contribution, Registration, Rejected, State
from diffurefill.fleet.run import Fenced, Run, Snapshot
from diffurefill.store.base import (
    MAIN,
    Change,
    Conflict,
    Corrupt,
    NotFound,
    Ref,
    StoreError,
    Version,
    dump_json,
    publish_surely,
    read_json,
)


class Averager(Protocol):
    """The arithmetic of a merge. The real one is fleet/averaging.py; tests use integers."""

    codec: str

    def fault(self, payload: Path, base: Path) -> str | None:
        """Why these bytes may not be merged (`schema`, `nonfinite`), or None."""
        ...

    def mean(self, base: Path, payloads: list[tuple[Path, float]], dest: Path) -> None:
        """`dest` = base + weighted mean of the payloads, summed in the given order."""
        ...

    def ema(self, previous: Path | None, new: Path, decay: float, dest: Path) -> None: ...


@dataclass
class Round:
    """What has been seen of the generation being collected. Times on this process's own clock."""

    eligible: dict[int, tuple[Contribution, Path]] = field(default_factory=dict)
    rejected: dict[tuple[int, str, int], Rejected] = field(default_factory=dict)
    """By identity. The next generation's record names them all."""
    recovering: bool = False
    """The first round of a merger, which leftovers of a dead fleet may close (`num_needed`)."""
    grace_since: float | None = None


class Merger:
    def __init__(
        self,
        run: Run,
        averager: Averager,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = print,
        on_event: Callable[[str, State], None] = lambda event, state: None,
    ) -> None:
        """`on_event(name, state)` hears `claimed`, `averaged` (not yet published), `published`."""
        self._run, self._averager = run, averager
        self._clock, self._report, self._on_event = clock, report, on_event
        self.merger_id = uuid.uuid4().hex
        self._seen: dict[str, str] = {}
        self._moved_at: dict[str, float] = {}
        self._now = run.snapshot()

    def run(self, generations: int | None = None) -> Iterator[float]:
        """Merge until `generations` exist (None: for ever), yielding seconds to wait."""
        self._claim()
        recovering = True
        while generations is None or self._now.state.gen < generations:
            self._finish_ema()
            collected = Round(recovering=recovering)
            while not self._complete(collected):
                yield self._run.config.fleet.poll_seconds
                self._require_term()
                self._collect(collected)
            self._merge(collected)
            recovering = False
            yield 0.0
        self._finish_ema()
        self._report(f"merger: generation {self._now.state.gen} reached, done")

    # --- the main lane ---------------------------------------------------------------------------

    def _claim(self) -> None:
        """Begin a new term. Retried on conflict: a claim is never a reason to give up."""
        self._run.store.selftest()
        while True:
            self._now = self._run.snapshot()
            before = self._now.state
            try:
                self._publish(protocol.claimed(before, self.merger_id), {})
                break
            except Fenced:
                continue  # somebody published between our read and our claim: read again
        self._report(
            f"merger: epoch {self._now.state.epoch} begins at generation {before.gen}, step "
            f"{before.step}, after {'nobody' if not before.merger_id else before.merger_id[:8]}"
        )
        self._on_event("claimed", self._now.state)

    def _publish(self, state: State, changes: dict[str, Change]) -> None:
        try:
            version = publish_surely(
                self._run.store,
                MAIN,
                {**changes, protocol.STATE: dump_json(protocol.to_json(state))},
                expect=self._now.version,
            )
        except Conflict:
            raise self._fenced() from None
        self._now = Snapshot(version, state)

    def _require_term(self) -> None:
        """Stop as soon as another merger has claimed the run. Safety does not depend on this."""
        if self._run.store.poll([MAIN])[MAIN] != self._now.version.id:
            raise self._fenced()

    def _fenced(self) -> Fenced:
        return Fenced(
            f"another merger took over after epoch {self._now.state.epoch}; this one stops and "
            "nothing is lost"
        )

    # --- collecting ------------------------------------------------------------------------------

    def _collect(self, collected: Round) -> None:
        """Look at every worker's lane that moved since the last look."""
        lanes = [n for n in self._run.store.lanes() if protocol.worker_of(n) is not None]
        for lane, head_id in self._run.store.poll(lanes).items():
            if head_id is None or self._seen.get(lane) == head_id:
                continue
            version = self._run.store.head(lane)
            if version is None:
                continue
            self._seen[lane] = version.id
            self._moved_at[lane] = self._clock()
            self._consider(lane, version, collected)
        needed, _ = self._needed(collected)
        if collected.grace_since is None and protocol.grace_opens(
            self._run.config.fleet, len(collected.eligible), needed
        ):
            collected.grace_since = self._clock()

    def _consider(self, lane: str, version: Version, collected: Round) -> None:
        """Judge the contribution on `lane`, if there is one, by its manifest and then its bytes."""
        found = self._read_lane(lane, version)
        if found is None:
            return
        c, registration = found
        worker, state = c.worker, self._now.state
        verdict: str = protocol.judge(c, state, registration, self._averager.codec)
        if verdict == "decided" or worker in collected.eligible:
            return
        if verdict == "eligible":
            payload = self._run.cache / f"{c.payload.sha256}.delta"
            verdict = self._fault(c.payload, payload) or verdict
            if verdict == "eligible":
                collected.eligible[worker] = (c, payload)
                self._report(f"merger: worker {worker} contributed to generation {state.gen}")
                return
        rejected = Rejected(
            worker=worker,
            incarnation=c.incarnation,
            seq=c.seq,
            base_gen=c.base_gen,
            reason=verdict,
        )
        self._report(f"merger: rejected worker {worker}, contribution {c.seq}: {verdict}")
        collected.rejected[rejected.identity] = rejected
        if verdict != "stale_base":  # its worker waits for a decision: tell it now
            self._publish(protocol.with_rejected(state, [rejected]), {})

    def _read_lane(self, lane: str, version: Version) -> tuple[Contribution, Registration] | None:
        """The lane's contribution, or None; a lane that cannot be read never stops the merger."""
        worker = protocol.worker_of(lane)
        assert worker is not None
        paths, store = protocol.worker_paths(worker), self._run.store
        if paths.manifest not in version.files:
            return None
        try:
            c = protocol.contribution_from_json(read_json(store, version, paths.manifest))
            registration = protocol.registration_from_json(
                read_json(store, version, paths.registration)
            )
            if worker != c.worker or worker != registration.worker:
                raise KeyError(f"it holds files of worker {c.worker}")
        except (StoreError, KeyError, TypeError) as error:
            self._report(f"merger: lane {lane} cannot be read ({error}); waiting for its next push")
            return None
        return c, registration

    def _fault(self, ref: Ref, payload: Path) -> str | None:
        try:
            self._run.cache.mkdir(parents=True, exist_ok=True)
            self._run.store.fetch(ref, payload)
        except (Corrupt, NotFound):
            return "corrupt"
        return self._averager.fault(payload, self._run.fetch(self._now.state.global_weights))

    def _live(self) -> int:
        """Workers whose lane moved within `live_seconds` on this process's own clock."""
        horizon = self._clock() - self._run.config.fleet.live_seconds
        return sum(moved >= horizon for moved in self._moved_at.values())

    def _needed(self, collected: Round) -> tuple[int, int]:
        live, fleet = self._live(), self._run.config.fleet
        return protocol.num_needed(fleet, live, recovering=collected.recovering), live

    def _complete(self, collected: Round) -> bool:
        needed, live = self._needed(collected)
        since = collected.grace_since
        return protocol.round_closes(
            self._run.config.fleet,
            num_eligible=len(collected.eligible),
            num_live=live,
            needed=needed,
            grace_elapsed=0.0 if since is None else self._clock() - since,
        )

    # --- averaging and publishing ----------------------------------------------------------------

    def _merge(self, collected: Round) -> None:
        """Average what was collected and publish it as the next generation, in one version."""
        state = self._now.state
        payloads = {c.identity: path for c, path in collected.eligible.values()}
        accepted = protocol.summation_order([c for c, _ in collected.eligible.values()])
        base = self._run.fetch(state.global_weights)
        dest = self._run.cache / f"{self.merger_id}.next"
        self._averager.mean(base, [(payloads[c.identity], float(c.tokens)) for c in accepted], dest)
        ref = self._keep(dest)
        following = protocol.advanced(
            state,
            accepted=accepted,
            rejected=list(collected.rejected.values()),
            global_weights=ref,
        )
        self._on_event("averaged", following)
        record = protocol.round_record(following, state.global_weights)
        self._publish(
            following,
            {protocol.GLOBAL: ref, protocol.round_path(following.gen): dump_json(record)},
        )
        for path in payloads.values():
            path.unlink(missing_ok=True)
        self._report(
            f"merger: published generation {following.gen} from "
            f"{len(accepted)} contribution{'s' if len(accepted) > 1 else ''} "
            f"(workers {', '.join(str(c.worker) for c in accepted)}), step {following.step}, "
            f"{following.tokens:,} tokens"
        )
        self._on_event("published", following)

    def _finish_ema(self) -> None:
        """Fold this generation into the EMA, in a second publish, unless it is there already.

        Off the critical path: workers train on the new global meanwhile. A merger that died in
        between left `ema.gen` behind `gen`, and its successor does it first.
        """
        state = self._now.state
        if not protocol.ema_is_due(state):
            return
        previous = self._run.fetch(state.ema.ref) if state.ema else None
        new = self._run.fetch(state.global_weights)
        dest = self._run.cache / f"{self.merger_id}.ema"
        self._averager.ema(previous, new, self._run.config.fleet.ema_decay, dest)
        ref = self._keep(dest)
        self._publish(protocol.with_ema(state, ref), {protocol.EMA: ref})
        self._run.forget(keep={state.global_weights.sha256, ref.sha256})

    def _keep(self, path: Path) -> Ref:
        """Stage a file made here and keep it as the local copy of its digest."""
        ref = self._run.store.stage(path)
        path.replace(self._run.cache / f"{ref.sha256}.safetensors")
        return ref
