"""What a merger sees of the workers: their lanes, their contributions, their pace.

A contribution is fetched and inspected as soon as it appears, so that only the averaging is left
when the round closes. All times are this process's own. Source: spec fleet.md 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diffurefill.fleet import gates, protocol, records, rounds
from diffurefill.fleet.averager import Averager
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Contribution, Identity, Registration, Rejected, State
from diffurefill.fleet.run import Run, Snapshot
from diffurefill.store.base import Corrupt, NotFound, Version, read_json


@dataclass
class Arrived:
    """A contribution that may be merged."""

    contribution: Contribution
    path: Path
    norm: float


@dataclass
class Pace:
    """A worker as its lane tells it, on this process's clock."""

    moved_at: float
    intervals: list[float] = field(default_factory=list)
    """Seconds from a generation's publication to this worker's contribution to it."""


class Collector:
    """The round being collected, and what is remembered of the workers between rounds."""

    def __init__(
        self,
        run: Run,
        averager: Averager,
        io: Patience,
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        self._run, self._averager, self._io = run, averager, io
        self._clock, self._report = clock, report
        self._seen: dict[str, str] = {}
        self.looked: dict[str, str] = {}
        """{lane: nonce} of the versions whose contribution was judged."""
        self._paces: dict[int, Pace] = {}
        self.begin(None)

    def begin(self, published_at: float | None) -> None:
        """A new round. `published_at` is when its global was published, None if not by us."""
        self.arrived: dict[int, Arrived] = {}
        self.rejected: dict[Identity, Rejected] = {}
        """The next generation's record names them all."""
        self._published_at = published_at
        self._grace_since: float | None = None

    # --- looking ---------------------------------------------------------------------------------

    def look(
        self, heads: Mapping[str, str | None], now: Snapshot
    ) -> Generator[float, None, list[Rejected]]:
        """Judge every worker's lane that moved; returns the new rejections to be told at once.

        A late contribution's worker goes on by itself, so that rejection waits for the round.
        """
        news = []
        for lane, head_id in heads.items():
            if head_id is None or self._seen.get(lane) == head_id:
                continue
            version = yield from self._io(lambda lane=lane: self._run.store.head(lane))
            if version is None or self._seen.get(lane) == version.id:
                continue
            self._seen[lane] = version.id
            rejected = yield from self._consider(lane, version, now)
            if rejected is not None and rejected.reason != "stale_base":
                news.append(rejected)
        return news

    def _consider(
        self, lane: str, version: Version, now: Snapshot
    ) -> Generator[float, None, Rejected | None]:
        """Judge the contribution on `lane`, if there is one, by its manifest and then its bytes."""
        worker = records.worker_of(lane)
        assert worker is not None
        pace = self._paces.setdefault(worker, Pace(self._clock()))
        pace.moved_at = self._clock()
        try:
            found = yield from self._io(lambda: self._read_lane(worker, version))
        except (Corrupt, NotFound, KeyError, TypeError) as error:
            self._report(f"merger: lane {lane} cannot be read ({error}); waiting for its next push")
            return None
        if found is None:
            return None
        c, registration = found
        verdict: str = protocol.judge(
            c, now.state, registration, self._averager.codecs, self._run.config.fleet.max_staleness
        )
        if worker in self.arrived and self.arrived[worker].contribution != c:
            return None  # one a round
        self.looked[lane] = version.nonce
        if verdict == "decided" or worker in self.arrived:
            return None
        if verdict == "eligible":
            path = self._run.cache / f"{c.payload.sha256}.delta"
            fault, norm = yield from self._inspect(c, path, now)
            if fault is None:
                self._arrive(Arrived(c, path, norm), pace, now.state)
                return None
            path.unlink(missing_ok=True)
            verdict = fault
        return self.reject(c, verdict)

    def _arrive(self, arrived: Arrived, pace: Pace, state: State) -> None:
        c = arrived.contribution
        self.arrived[c.worker] = arrived
        if self._published_at is not None and c.base_gen == state.gen:
            pace.intervals.append(self._clock() - self._published_at)
            del pace.intervals[: -rounds.PACE_MEMORY]
        self._report(f"merger: worker {c.worker} contributed to generation {state.gen}")

    def _read_lane(self, worker: int, version: Version) -> tuple[Contribution, Registration] | None:
        """The lane's contribution, or None when it holds none yet."""
        paths, store = records.worker_paths(worker), self._run.store
        if paths.manifest not in version.files:
            return None
        c = records.contribution_from_json(read_json(store, version, paths.manifest))
        registration = records.registration_from_json(read_json(store, version, paths.registration))
        if worker != c.worker or worker != registration.worker:
            raise KeyError(f"it holds files of worker {c.worker}")
        return c, registration

    def _inspect(
        self, c: Contribution, path: Path, now: Snapshot
    ) -> Generator[float, None, tuple[str | None, float]]:
        """(why the bytes may not be merged or None, the delta's norm)."""
        self._run.cache.mkdir(parents=True, exist_ok=True)
        try:
            yield from self._io(lambda: self._run.store.fetch(c.payload, path))
        except (Corrupt, NotFound):
            return "corrupt", 0.0
        base = yield from self._io(lambda: self._run.fetch_global(now, self._averager.apply_update))
        inspection = self._averager.inspect(path, c.codec, base)
        ratio = self._run.config.fleet.max_norm_ratio
        if inspection.fault is None and not gates.norm_is_usual(
            inspection.norm, c.moment_steps, now.state.norms, ratio
        ):
            return "norm", inspection.norm
        return inspection.fault, inspection.norm

    # --- deciding --------------------------------------------------------------------------------

    def reject(self, c: Contribution, reason: str) -> Rejected:
        """Put `c`'s rejection on this round's record and take it out of the round."""
        self._report(f"merger: rejected worker {c.worker}, contribution {c.seq}: {reason}")
        rejected = Rejected(
            worker=c.worker,
            incarnation=c.incarnation,
            seq=c.seq,
            base_gen=c.base_gen,
            reason=reason,
        )
        self.rejected[c.identity] = rejected
        arrived = self.arrived.get(c.worker)
        if arrived is not None and arrived.contribution == c:
            del self.arrived[c.worker]
            arrived.path.unlink(missing_ok=True)
        return rejected

    # --- waiting ---------------------------------------------------------------------------------

    def live(self) -> list[int]:
        """Workers worth waiting for, by when their lanes last moved."""
        now, fleet = self._clock(), self._run.config.fleet
        return sorted(
            worker
            for worker, pace in self._paces.items()
            if now - pace.moved_at <= rounds.live_horizon(fleet, pace.intervals)
        )

    def is_complete(self, *, recovering: bool) -> bool:
        """Whether to average now."""
        fleet, live = self._run.config.fleet, self.live()
        needed = rounds.num_needed(fleet, len(live), recovering=recovering)
        if self._grace_since is None and rounds.grace_opens(fleet, len(self.arrived), needed):
            self._grace_since = self._clock()
        since = self._grace_since
        return rounds.round_closes(
            fleet,
            num_eligible=len(self.arrived),
            needed=needed,
            missing=[self._expected(w) for w in live if w not in self.arrived],
            grace_elapsed=0.0 if since is None else self._clock() - since,
        )

    def _expected(self, worker: int) -> float | None:
        """Seconds until `worker` is predicted to contribute to this round; None: no telling."""
        usual = rounds.predicted(self._paces[worker].intervals)
        if usual is None or self._published_at is None:
            return None
        return self._published_at + usual - self._clock()
