"""A worker's own lane: its registration, contributions and log, each publish a compare-and-swap.

A second process under the same number takes the lane over by registering, and this one's next
publish finds out. Source: spec fleet.md 5.2 (3), 5.4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from diffurefill.fleet import records
from diffurefill.fleet.budget import CommitPart
from diffurefill.fleet.log import WorkerLog
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Contribution, Registration, State
from diffurefill.fleet.run import Fenced, Run
from diffurefill.store.base import (
    Busy,
    Change,
    Conflict,
    Corrupt,
    NotFound,
    Publication,
    Version,
    compact_surely,
    dump_json,
    read_json,
)

MAX_SQUASHED = 5
"""Times in a row that a lane may be compacted between our look and our reading it."""


class Taken(Fenced):
    """Two processes registered under one number at the same moment; the other one has it."""


class WorkerLane:
    def __init__(
        self,
        run: Run,
        number: int,
        incarnation: str,
        log: WorkerLog,
        io: Patience,
        clock: Callable[[], float],
    ) -> None:
        self._run, self._number, self._io, self._clock = run, number, io, clock
        self.lane, self._paths = records.lane_of(number), records.worker_paths(number)
        self.registration = Registration(worker=number, incarnation=incarnation)
        self.log = log
        self._version: Version | None = None
        self._unsettled: Publication | None = None
        """A publish of the log whose outcome was in doubt when training went on."""
        self._part = CommitPart(run.config.fleet.commits_per_hour, 1, clock)
        self._pushed_log_at = clock()

    def register(self, machine: str) -> Generator[float, None, Contribution | None]:
        """Take the lane for this incarnation, leaving an unmerged contribution untouched.

        Returns that contribution, which may be decided already. Raises Taken when another process
        registered at the same moment.
        """
        head, (found, pending) = yield from self._read_head()
        self.log.note("register", {"found": found, "machine": machine})
        changes = {self._paths.registration: self._registration_json()}
        try:
            yield from self._publish({**changes, self._paths.log: self.log.content()}, head)
        except Conflict:
            raise Taken(
                f"worker {self._number} was started twice at the same moment: the other one has "
                "its lane; start this one with another --worker number"
            ) from None
        return pending

    def _read_head(
        self,
    ) -> Generator[float, None, tuple[Version | None, tuple[str, Contribution | None]]]:
        """The head and what it holds. A holder that compacts meanwhile makes us look again."""
        for _attempt in range(MAX_SQUASHED):
            head = yield from self._io(lambda: self._run.store.head(self.lane))
            with contextlib.suppress(NotFound):
                return head, (yield from self._read(head))
            yield self._run.config.fleet.poll_seconds
        raise Corrupt(f"lane {self.lane} names files that are not there")

    def _read(
        self, head: Version | None
    ) -> Generator[float, None, tuple[str, Contribution | None]]:
        """What an earlier incarnation left at `head`, in words, and its contribution."""
        if head is None:
            return "an empty lane", None
        store, pending = self._run.store, None
        registered = yield from self._io(lambda: read_json(store, head, self._paths.registration))
        before = records.registration_from_json(registered)
        if self._paths.manifest in head.files:
            manifest = yield from self._io(lambda: read_json(store, head, self._paths.manifest))
            pending = records.contribution_from_json(manifest)
        if self._paths.log in head.files:
            content = yield from self._io(lambda: store.read(head.ref(self._paths.log)))
            self.log.continue_from(content)
        self.registration = replace(
            self.registration,
            inherited=pending.incarnation if pending else None,
            compacted_gen=before.compacted_gen,
        )
        return f"the lane of incarnation {before.incarnation[:8]}", pending

    def push(self, c: Contribution, state: State) -> Iterator[float]:
        """Payload, manifest and log in one publish; then give room back if the run does."""
        changes: dict[str, Change] = {
            self._paths.manifest: dump_json(records.to_json(c)),
            self._paths.payload: c.payload,
        }
        compacts = state.compacted_gen > self.registration.compacted_gen
        if compacts:  # on record before anything is deleted
            self.registration = replace(self.registration, compacted_gen=c.base_gen)
            changes[self._paths.registration] = self._registration_json()
        yield from self._push(changes)
        if compacts and (version := self._version) is not None:
            try:
                self._version = yield from self._io(
                    lambda: compact_surely(self._run.store, self.lane, version)
                )
            except Conflict:
                raise self._fenced() from None

    def beat(self, live: int) -> Iterator[float]:
        """Push the log alone when it is due: liveness is read from pushed logs, never from pings.

        One attempt: a store that does not answer must not stop the training. Of a limited number
        of commits, logs take no more than this worker's share among `live` workers and a merger.
        """
        fleet = self._run.config.fleet
        if self._clock() - self._pushed_log_at < fleet.log_seconds or not self._part.has_room(live):
            return
        yield 0.0
        changes: dict[str, Change] = {self._paths.log: self.log.content()}
        publication = self._unsettled or Publication(
            self._run.store, self.lane, changes, expect=self._version
        )
        try:
            self._settle(publication.attempt())
        except (Busy, Corrupt):
            self._unsettled = publication
        except Conflict:
            raise self._fenced() from None

    def log_is_due(self) -> bool:
        return self._clock() - self._pushed_log_at >= self._run.config.fleet.log_seconds

    # --- publishing ------------------------------------------------------------------------------

    def _push(self, changes: dict[str, Change]) -> Iterator[float]:
        try:
            if self._unsettled is not None:
                self._settle((yield from self._io(self._unsettled.attempt)))
            changes = {**changes, self._paths.log: self.log.content()}
            yield from self._publish(changes, self._version)
        except Conflict:
            raise self._fenced() from None

    def _publish(self, changes: dict[str, Change], expect: Version | None) -> Iterator[float]:
        publication = Publication(self._run.store, self.lane, changes, expect=expect)
        self._settle((yield from self._io(publication.attempt)))

    def _settle(self, version: Version) -> None:
        self._version, self._unsettled = version, None
        self._pushed_log_at = self._clock()
        self._part.spend()

    def _registration_json(self) -> bytes:
        return dump_json(records.to_json(self.registration))

    def _fenced(self) -> Fenced:
        return Fenced(
            f"another process took over worker {self._number}; this one (incarnation "
            f"{self.registration.incarnation[:8]}) stops. Give every worker its own --worker number"
        )
