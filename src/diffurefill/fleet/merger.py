"""The merger: claim the run, collect contributions, average them, publish the next global.

It may be killed at any instruction. Nothing durable lives only here: a new merger claims the next
epoch, finishes what the old one left out of its second publish, merges what workers had pushed,
and goes on. Of two mergers alive only the newer can publish: every publish is a compare-and-swap
on lane `main`, and the older one finds that the head has moved and stands by.

`Merger.run` is a generator that yields the seconds it wants to wait; see worker.py for why.
Source: spec fleet.md 5.2-5.4, algorithms.md 3.5.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from diffurefill.fleet import protocol, records
from diffurefill.fleet.averager import Averager, Guard
from diffurefill.fleet.collect import Arrived, Collector
from diffurefill.fleet.follow import Followers, keep
from diffurefill.fleet.merging import Attempt, Base, Merging
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Identity, State
from diffurefill.fleet.run import Fenced, Run
from diffurefill.fleet.term import Term
from diffurefill.store.base import (
    MAIN,
    Change,
    dump_json,
    sha256_file,
)


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
        self.term = Term(run, self.merger_id, self._io, clock, report)
        self._followers = Followers(run, averager, self.merger_id, self._io)
        self._collector: Collector
        self._merging = Merging(run.config.fleet, averager, guard, run.cache, self.merger_id)
        self._merge_seconds = 0.0
        self._held: frozenset[Identity] = frozenset()
        """What the guard refused to publish as a whole; tried again when it changes."""

    def run(self, generations: int | None = None) -> Iterator[float]:
        """Merge until `generations` exist (None: for ever), yielding seconds to wait."""
        yield from self._io(self._run.store.selftest)
        while True:
            yield from self.term.await_turn()
            if self._is_over(generations):
                break
            try:
                yield from self.term.claim()
                self._on_event("claimed", self.term.state)
                yield from self._serve(generations)
                yield from self.term.publish(protocol.released(self.term.state), {})
                break
            except Fenced as fenced:
                self._report(f"merger: {fenced}")
        self._report(f"merger: generation {self.term.state.gen} reached, done")

    def _is_over(self, generations: int | None) -> bool:
        state = self.term.state
        reached = generations is not None and state.gen >= generations
        return reached and not state.merger_id and not self._followers.due(state)

    # --- rounds ----------------------------------------------------------------------------------

    def _serve(self, generations: int | None) -> Iterator[float]:
        recovering, published_at = True, None
        # New with every term: what was seen before may have been undone by somebody else's.
        for payload in self._run.cache.glob("*.delta"):
            payload.unlink()
        self._collector = Collector(self._run, self._averager, self._io, self._clock, self._report)
        while generations is None or self.term.state.gen < generations:
            yield from self._second_publish()
            self._collector.begin(published_at)
            before = self.term.state.gen
            while self.term.state.gen == before:
                yield from self._collect(recovering)
                yield from self._merge()
            recovering, published_at = False, self.term.published_at
        yield from self._second_publish()

    def _collect(self, recovering: bool) -> Iterator[float]:
        """Wait for enough contributions; rejections are told at once, with signs of life."""
        fleet, store = self._run.config.fleet, self._run.store
        num_arrived = 0
        while True:
            # What arrived while contributions were downloaded is not kept waiting.
            yield fleet.poll_seconds if len(self._collector.arrived) <= num_arrived else 0.0
            num_arrived = len(self._collector.arrived)
            lanes = yield from self._io(store.lanes)
            ours = [lane for lane in lanes if records.worker_of(lane) is not None]
            heads = yield from self._io(lambda ours=ours: store.poll([MAIN, *ours]))
            yield from self.term.require(heads.pop(MAIN))
            rejected = yield from self._collector.look(heads, self.term.now)
            if rejected:
                yield from self.term.publish(protocol.with_rejected(self.term.state, rejected), {})
            if self._collector.is_complete(recovering=recovering) and self._is_news():
                return
            yield from self.term.beat(self._collector.live())

    def _is_news(self) -> bool:
        return _identities(self._collector) != self._held

    # --- averaging and publishing ----------------------------------------------------------------

    def _merge(self) -> Iterator[float]:
        """Average what was collected and publish it as the next generation, in one version.

        What the gates refuse is put on record and the rest is merged; when nothing is left, the
        round goes on.
        """
        state, arrived = self.term.state, list(self._collector.arrived.values())
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
        yield from self.term.publish(following, {})

    def _global(self) -> Generator[float, None, Path]:
        now = self.term.now
        return (
            yield from self._io(lambda: self._run.fetch_global(now, self._averager.apply_update))
        )

    def _momentum(self) -> Generator[float, None, Path | None]:
        """The outer step's momentum; None when it starts from zero."""
        saved = self.term.state.momentum
        if not self._averager.needs_momentum:
            return None
        if saved is None or saved.gen != self.term.state.gen:
            self._report("merger: the outer step's momentum starts from zero")
            return None
        return (yield from self._io(lambda: self._run.fetch(saved.ref)))

    def _advance(self, attempt: Attempt) -> Iterator[float]:
        """Publish the merged global as the next generation."""
        before, merging, began = self.term.state, self._merging, self._clock()
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
            looked=self._collector.looked,
            live=self._collector.live(),
            max_staleness=self._run.config.fleet.max_staleness,
        )
        self._on_event("averaged", following)
        record = records.round_record(following, before.global_weights)
        changes[records.round_path(following.gen)] = dump_json(record)
        yield from self.term.publish(following, changes)
        self._merging.published(ref.sha256)
        self._followers.folded(ref.sha256)
        self._held = frozenset()
        for arrived in attempt.merged:
            arrived.path.unlink(missing_ok=True)
        phases = (
            f"merged in {self._merge_seconds:.1f} s, published in {self._clock() - began:.1f} s"
        )
        gain = self._averager.outer_gain
        moved = "" if gain is None else f"; the outer step is {gain:.2f} times the mean delta"
        self._report(f"{_summary(following)}{moved}; {phases}")
        self._on_event("published", following)

    def _second_publish(self) -> Iterator[float]:
        """EMA, SWA, snapshots, compaction: what follows a generation and is not done yet."""
        state, changes = yield from self._followers.changes(self.term.now)
        if changes:
            yield from self.term.publish(state, changes)
        self._followers.keep_local(self.term.state)
        every, state = self._run.config.fleet.compact_every, self.term.state
        if every and state.gen - state.compacted_gen >= every:
            yield from self.term.compact()


# --- helpers -------------------------------------------------------------------------------------


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
