"""The merger: claim the run, collect contributions, average them, publish the next global.

It may be killed at any instruction. Nothing durable lives only here: a new merger claims the next
epoch, finishes what the old one left out of its second publish, merges what workers had pushed,
and goes on. Of two mergers alive only the newer can publish: every publish is a compare-and-swap
on lane `main`, and the older one finds that the head has moved and stands by.

`Merger.run` is a generator that yields the seconds it wants to wait; see worker.py for why.
Source: spec fleet.md 5.2-5.4, algorithms.md 3.5.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from diffurefill.fleet import protocol, records
from diffurefill.fleet.averager import Averager, Guard
from diffurefill.fleet.budget import MERGER_PARTS, CommitBudget
from diffurefill.fleet.collect import Arrived, Collector
from diffurefill.fleet.follow import Followers, keep
from diffurefill.fleet.merging import Attempt, Base, Merging
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Identity, State
from diffurefill.fleet.run import Fenced, Run, Snapshot
from diffurefill.store.base import (
    MAIN,
    Change,
    Conflict,
    Publication,
    StoreError,
    Version,
    compact_surely,
    dump_json,
    publish_surely,
    sha256_file,
)

BEATS_PER_LEASE = 3.0


class Merger:
    def __init__(
        self,
        run: Run,
        averager: Averager,
        guard: Guard | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = print,
        on_event: Callable[[str, State], None] = lambda event, state: None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """`on_event(name, state)` hears `claimed`, `averaged` (not yet published), `published`."""
        self._run, self._averager = run, averager
        self._clock, self._report, self._on_event = clock, report, on_event
        self.merger_id = new_id()
        self._io = Patience(lambda line: report(f"merger: {line}"), random.Random(self.merger_id))
        self._followers = Followers(run, averager, self.merger_id, self._io)
        self._collector: Collector
        self._merging = Merging(run.config.fleet, averager, guard, run.cache, self.merger_id)
        self._published_at = clock()
        self._budget = CommitBudget(run.config.fleet.commits_per_hour, MERGER_PARTS, clock)
        self._merge_seconds = 0.0
        self._held: frozenset[Identity] = frozenset()
        """What the guard refused to publish as a whole; tried again when it changes."""
        self._now: Snapshot

    def run(self, generations: int | None = None) -> Iterator[float]:
        """Merge until `generations` exist (None: for ever), yielding seconds to wait."""
        yield from self._io(self._run.store.selftest)
        while (yield from self._await_turn(generations)):
            try:
                yield from self._claim()
                yield from self._serve(generations)
                yield from self._publish(protocol.released(self._now.state), {})
                break
            except Fenced as fenced:
                self._report(f"merger: {fenced}")
        self._report(f"merger: generation {self._now.state.gen} reached, done")

    # --- the term --------------------------------------------------------------------------------

    def _await_turn(self, generations: int | None) -> Generator[float, None, bool]:
        """Stand by while another merger shows signs of life; False when there is nothing to do.

        Only this process's own clock counts: the main lane must not have moved for a lease. The
        lease saves work, never safety, which is the compare-and-swap's.
        """
        seen, since, told = None, self._clock(), False
        while True:
            self._now = yield from self._io(self._run.snapshot)
            state = self._now.state
            if not state.merger_id:
                return not self._is_over(generations)
            if self._now.version.id != seen:
                seen, since = self._now.version.id, self._clock()
            if self._clock() - since >= self._run.config.fleet.lease_seconds:
                return True
            if not told:
                lease = self._run.config.fleet.lease_seconds
                self._report(
                    "merger: another one holds the term; standing by until it is silent for "
                    f"{lease:.0f} s"
                )
                told = True
            yield self._run.config.fleet.poll_seconds

    def _is_over(self, generations: int | None) -> bool:
        done = generations is not None and self._now.state.gen >= generations
        return done and not self._followers.due(self._now.state)

    def _claim(self) -> Iterator[float]:
        """Begin a new term."""
        before = self._now.state
        yield from self._publish(protocol.claimed(before, self.merger_id), {})
        self._report(
            f"merger: epoch {self._now.state.epoch} begins at generation {before.gen}, step "
            f"{before.step}, after {before.merger_id[:8] or 'nobody'}"
        )
        self._on_event("claimed", self._now.state)

    def release(self) -> None:
        """Give the term up at once, for a process that is being interrupted."""
        with contextlib.suppress(StoreError, AttributeError):
            if self._now.state.merger_id == self.merger_id:
                state = protocol.released(self._now.state)
                publish_surely(self._run.store, MAIN, _changes(state), expect=self._now.version)

    def _publish(self, state: State, changes: dict[str, Change]) -> Iterator[float]:
        """The next version of the main lane, or Fenced when somebody else has written there."""
        publication = Publication(
            self._run.store, MAIN, {**changes, **_changes(state)}, expect=self._now.version
        )
        try:
            version = yield from self._io(publication.attempt)
        except Conflict:
            raise self._fenced() from None
        self._hold(version, state)

    def _hold(self, version: Version, state: State) -> None:
        self._now = Snapshot(version, state)
        self._published_at = self._clock()
        self._budget.spend()

    def _fenced(self) -> Fenced:
        return Fenced(
            f"another merger took over after epoch {self._now.state.epoch}; this one stands by, "
            "nothing is lost"
        )

    def _require_term(self, head_id: str | None) -> Iterator[float]:
        """Stop as soon as another merger has claimed the run. Safety does not depend on this."""
        if head_id == self._now.version.id:
            return
        newest = yield from self._io(self._run.snapshot)
        if newest.state.epoch > self._now.state.epoch:
            raise self._fenced()

    # --- rounds ----------------------------------------------------------------------------------

    def _serve(self, generations: int | None) -> Iterator[float]:
        recovering, published_at = True, None
        # New with every term: what was seen before may have been undone by somebody else's.
        self._collector = Collector(self._run, self._averager, self._io, self._clock, self._report)
        while generations is None or self._now.state.gen < generations:
            yield from self._second_publish()
            self._collector.begin(published_at)
            before = self._now.state.gen
            while self._now.state.gen == before:
                yield from self._collect(recovering)
                yield from self._merge()
            recovering, published_at = False, self._published_at
        yield from self._second_publish()

    def _collect(self, recovering: bool) -> Iterator[float]:
        """Wait for enough contributions; rejections are told at once, with signs of life."""
        fleet, store = self._run.config.fleet, self._run.store
        while True:
            yield fleet.poll_seconds
            lanes = yield from self._io(store.lanes)
            ours = [lane for lane in lanes if records.worker_of(lane) is not None]
            heads = yield from self._io(lambda ours=ours: store.poll([MAIN, *ours]))
            yield from self._require_term(heads.pop(MAIN))
            rejected = yield from self._collector.look(heads, self._now)
            if rejected:
                yield from self._publish(protocol.with_rejected(self._now.state, rejected), {})
            if self._collector.is_complete(recovering=recovering) and self._is_news():
                return
            live = self._collector.live()
            if self._beat_is_due() and self._budget.has_room(len(live)):
                yield from self._publish(protocol.beaten(self._now.state, live), {})

    def _beat_is_due(self) -> bool:
        lease = self._run.config.fleet.lease_seconds
        return self._clock() - self._published_at >= lease / BEATS_PER_LEASE

    def _is_news(self) -> bool:
        return _identities(self._collector) != self._held

    # --- averaging and publishing ----------------------------------------------------------------

    def _merge(self) -> Iterator[float]:
        """Average what was collected and publish it as the next generation, in one version.

        What the gates refuse is put on record and the rest is merged; when nothing is left, the
        round goes on.
        """
        state, arrived = self._now.state, list(self._collector.arrived.values())
        base = Base(state, (yield from self._global()), (yield from self._momentum()))
        folds = yield from self._followers.folds(_preview(state, arrived))
        began = self._clock()
        attempt = self._merging.attempt(base, arrived, list(folds.values()))
        self._merge_seconds = self._clock() - began
        refused = [self._collector.reject(c, reason) for c, reason in attempt.refused]
        if attempt.merged:
            yield from self._advance(attempt)
            return
        self._held = _identities(self._collector) if attempt.held else frozenset()
        following = protocol.with_rejected(state, refused)
        if attempt.held:
            following = replace(following, alert=_held_back(state.gen + 1))
            self._report(f"merger: {following.alert}")
        yield from self._publish(following, {})

    def _global(self) -> Generator[float, None, Path]:
        now = self._now
        return (
            yield from self._io(lambda: self._run.fetch_global(now, self._averager.apply_update))
        )

    def _momentum(self) -> Generator[float, None, Path | None]:
        """The outer step's momentum; None when it starts from zero."""
        saved = self._now.state.momentum
        if not self._averager.needs_momentum:
            return None
        if saved is None or saved.gen != self._now.state.gen:
            self._report("merger: the outer step's momentum starts from zero")
            return None
        return (yield from self._io(lambda: self._run.fetch(saved.ref)))

    def _advance(self, attempt: Attempt) -> Iterator[float]:
        """Publish the merged global as the next generation."""
        before, merging, began = self._now.state, self._merging, self._clock()
        changes: dict[str, Change] = {}
        update = ref = None
        if merging.update is not None:
            update = changes[records.UPDATE] = yield from keep(self._run, self._io, merging.update)
            ref = sha256_file(merging.weights)
            merging.weights.replace(self._run.path_of(ref))
        else:
            ref = changes[records.GLOBAL] = yield from keep(self._run, self._io, merging.weights)
        momentum = None
        if merging.momentum is not None:
            momentum = yield from keep(self._run, self._io, merging.momentum)
            changes[records.MOMENTUM] = momentum
        accepted = [a.contribution for a in attempt.merged]
        following = protocol.advanced(
            before,
            accepted=accepted,
            measured=attempt.measured,
            rejected=list(self._collector.rejected.values()),
            global_weights=ref,
            update=update,
            momentum=momentum,
            guard_ce=attempt.guard_ce,
            live=self._collector.live(),
            max_staleness=self._run.config.fleet.max_staleness,
        )
        self._on_event("averaged", following)
        record = records.round_record(following, before.global_weights)
        changes[records.round_path(following.gen)] = dump_json(record)
        yield from self._publish(following, changes)
        self._merging.published(ref.sha256)
        self._followers.folded(ref.sha256)
        self._held = frozenset()
        for arrived in attempt.merged:
            arrived.path.unlink(missing_ok=True)
        phases = (
            f"merged in {self._merge_seconds:.1f} s, published in {self._clock() - began:.1f} s"
        )
        self._report(f"{_summary(following)}; {phases}")
        self._on_event("published", following)

    def _second_publish(self) -> Iterator[float]:
        """EMA, SWA, snapshots, compaction: what follows a generation and is not done yet."""
        state, changes = yield from self._followers.changes(self._now)
        if changes:
            yield from self._publish(state, changes)
        self._followers.keep_local(self._now.state)
        every = self._run.config.fleet.compact_every
        if every and self._now.state.gen - self._now.state.compacted_gen >= every:
            yield from self._publish(protocol.compacted(self._now.state), {})
            now = self._now
            try:
                version = yield from self._io(
                    lambda: compact_surely(self._run.store, MAIN, now.version)
                )
            except Conflict:
                raise self._fenced() from None
            self._hold(version, now.state)


# --- helpers -------------------------------------------------------------------------------------


def _changes(state: State) -> dict[str, Change]:
    return {records.STATE: dump_json(records.to_json(state))}


def _identities(collector: Collector) -> frozenset[Identity]:
    return frozenset(a.contribution.identity for a in collector.arrived.values())


def _preview(state: State, arrived: Sequence[Arrived]) -> State:
    """The next generation as far as the side averages look at it."""
    steps = max(a.contribution.steps for a in arrived)
    return replace(state, gen=state.gen + 1, step=state.step + steps)


def _held_back(gen: int) -> str:
    return (
        f"generation {gen} is held back: held-out text got worse and no single contribution "
        "explains it. Look at the workers' logs; then `diffurefill rollback`, or start the merger "
        "with --no-guard to accept it"
    )


def _summary(state: State) -> str:
    workers = ", ".join(str(c.worker) for c in state.accepted)
    n = len(state.accepted)
    return (
        f"merger: published generation {state.gen} from {n} contribution{'s' if n > 1 else ''} "
        f"(workers {workers}), step {state.step}, {state.tokens:,} tokens"
    )
