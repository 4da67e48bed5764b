"""A merger's hold on the main lane: waiting for it, claiming it, publishing, giving it up.

Every publish is a compare-and-swap on the version that this merger last saw or made. Whoever was
overtaken finds out there, at the latest, and has changed nothing. Source: spec fleet.md 5.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from diffurefill.fleet import protocol, records
from diffurefill.fleet.budget import MERGER_PARTS, CommitPart
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import State
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
)

BEATS_PER_LEASE = 3.0


class Term:
    """`now` is the main lane as this merger last saw or published it."""

    def __init__(
        self,
        run: Run,
        merger_id: str,
        io: Patience,
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        self._run, self._io, self._clock, self._report = run, io, clock, report
        self.merger_id = merger_id
        self.now: Snapshot
        self.published_at = clock()
        self._part = CommitPart(run.config.fleet.commits_per_hour, MERGER_PARTS, clock)

    @property
    def state(self) -> State:
        return self.now.state

    # --- whose turn it is ------------------------------------------------------------------------

    def await_turn(self) -> Iterator[float]:
        """Stand by while another merger shows signs of life.

        Only this process's own clock counts: the main lane must not have moved for a lease. The
        lease saves work, never safety, which is the compare-and-swap's.
        """
        lease, told = self._run.config.fleet.lease_seconds, False
        seen, since = None, self._clock()
        while True:
            self.now = yield from self._io(self._run.snapshot)
            if self.now.version.id != seen:
                seen, since = self.now.version.id, self._clock()
            if not self.state.merger_id or self._clock() - since >= lease:
                return
            if not told:
                self._report(
                    "merger: another one holds the term; standing by until it is silent for "
                    f"{lease:.0f} s"
                )
                told = True
            yield self._run.config.fleet.poll_seconds

    def claim(self) -> Iterator[float]:
        """Begin a new term."""
        before = self.state
        yield from self.publish(protocol.claimed(before, self.merger_id), {})
        self._report(
            f"merger: epoch {self.state.epoch} begins at generation {before.gen}, step "
            f"{before.step}, after {before.merger_id[:8] or 'nobody'}"
        )

    def require(self, head_id: str | None) -> Iterator[float]:
        """Stop as soon as another merger has claimed the run. Safety does not depend on this."""
        if head_id == self.now.version.id:
            return
        newest = yield from self._io(self._run.snapshot)
        if newest.state.epoch > self.state.epoch:
            raise self._fenced()

    def beat(self, live: list[int]) -> Iterator[float]:
        """Show that this merger lives, when nothing else was published for a while."""
        lease = self._run.config.fleet.lease_seconds
        due = self._clock() - self.published_at >= lease / BEATS_PER_LEASE
        if due and self._part.has_room(len(live)):
            yield from self.publish(protocol.beaten(self.state, live), {})

    def release(self) -> None:
        """Give the term up at once, for a process that is being interrupted."""
        with contextlib.suppress(StoreError, AttributeError):
            if self.state.merger_id == self.merger_id:
                files = with_state(protocol.released(self.state), {})
                publish_surely(self._run.store, MAIN, files, expect=self.now.version)

    # --- publishing ------------------------------------------------------------------------------

    def publish(self, state: State, changes: dict[str, Change]) -> Iterator[float]:
        """The next version of the main lane, or Fenced when somebody else has written there."""
        publication = Publication(
            self._run.store, MAIN, with_state(state, changes), expect=self.now.version
        )
        try:
            version = yield from self._io(publication.attempt)
        except Conflict:
            raise self._fenced() from None
        self.hold(version, state)

    def compact(self) -> Iterator[float]:
        """Give back what only older versions need; on record before anything is deleted."""
        yield from self.publish(protocol.compacted(self.state), {})
        now = self.now
        try:
            version = yield from self._io(
                lambda: compact_surely(self._run.store, MAIN, now.version)
            )
        except Conflict:
            raise self._fenced() from None
        self.hold(version, now.state)

    def hold(self, version: Version, state: State) -> None:
        self.now = Snapshot(version, state)
        self.published_at = self._clock()
        self._part.spend()

    def _fenced(self) -> Fenced:
        return Fenced(
            f"another merger took over after epoch {self.state.epoch}; this one stands by, "
            "nothing is lost"
        )


def with_state(state: State, changes: dict[str, Change]) -> dict[str, Change]:
    return {**changes, records.STATE: dump_json(records.to_json(state))}
