"""Where a worker's time goes: its steps, and what lies between two intervals.

Between the last step of an interval and the first of the next, a worker pushes, waits for the last
of its round's contributions, waits for the merger, and takes the new global over. Those four are
measured here from what happens on the hub, over all workers and rounds.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass, field

from diffurefill.config import UserError
from diffurefill.fleet.records import STATE, worker_of, worker_paths
from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.store.base import MAIN, Version


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Mean seconds of one worker's round."""

    train: float = 0.0
    push: float = 0.0
    """Last step to own contribution on the hub."""
    others: float = 0.0
    """Until the last contribution of the round is on the hub."""
    merger: float = 0.0
    """Until the new global is on the hub: grace, downloads, averaging, upload."""
    adopt: float = 0.0
    """Until the first step on it: noticing, download, loading."""


@dataclass(eq=False)
class Life:
    """One launch of a worker."""

    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """(start, seconds, tokens)"""
    pushed: list[float] = field(default_factory=lambda: [0.0])
    """Times of its contributions."""
    died: float | None = None


class Timeline:
    """Listens to `hub`; counts from `since` on."""

    def __init__(self, hub: SimHub, since: float) -> None:
        self.since, self.hub = since, hub
        self.lives: dict[str, Life] = {}
        self.commits: list[float] = []
        self._pushed: dict[tuple[str, int], float] = {}
        """(incarnation, seq) -> when"""
        self._gen = 0
        self._rounds: list[tuple[float, dict[str, float], int]] = []
        """Of each generation: when it was published, when each writer's contribution to it was
        pushed, and the run's tokens by then."""
        self._writer: dict[tuple[str, int], str] = {}
        hub.on_publish.append(self._published)

    # --- listening -------------------------------------------------------------------------------

    def stepped(self, name: str, start: float, seconds: float, tokens: int) -> None:
        self.lives.setdefault(name, Life()).steps.append((start, seconds, tokens))

    def died(self, name: str, now: float) -> None:
        if name in self.lives:
            self.lives[name].died = now

    def _published(self, version: Version, writer: str) -> None:
        now = self.hub.clock()
        self.commits.append(now)
        worker = worker_of(version.lane)
        if worker is not None and worker_paths(worker).manifest in version.files:
            manifest = self._json(version, worker_paths(worker).manifest)
            key = (manifest["incarnation"], manifest["seq"])
            if key not in self._pushed:
                self._pushed[key], self._writer[key] = now, writer
                self.lives[writer].pushed.append(now)
        elif version.lane == MAIN:
            state = self._json(version, STATE)
            if state["gen"] > self._gen:
                self._gen = state["gen"]
                keys = [(c["incarnation"], c["seq"]) for c in state["accepted"]]
                pushed = {self._writer[key]: self._pushed[key] for key in keys}
                self._rounds.append((now, pushed, state["tokens"]))

    def _json(self, version: Version, path: str) -> dict:
        return json.loads(self.hub.blobs[version.files[path].sha256])

    # --- counting --------------------------------------------------------------------------------

    def whole_rounds(self) -> tuple[float, float, int, int]:
        """From the first to the last counted generation: (since, until, generations, tokens)."""
        counted = [(at, tokens) for at, _, tokens in self._rounds if at >= self.since]
        if len(counted) < 2:
            raise UserError(
                "a round of this fleet takes longer than the time simulated: give more --hours"
            )
        (since, before), (until, after) = counted[0], counted[-1]
        return since, until, len(counted) - 1, after - before

    def alive_seconds(self, since: float, until: float) -> float:
        """From each launch's first step to its death, between the two times."""
        total = 0.0
        for life in self.lives.values():
            died = until if life.died is None else life.died
            total += max(0.0, min(until, died) - max(life.steps[0][0], since))
        return total

    def trained(self, since: float, until: float) -> tuple[float, float]:
        """(seconds, tokens) of all steps between the two times."""
        total = tokens = 0.0
        for life in self.lives.values():
            last = until if life.died is None else min(until, life.died)
            for start, seconds, step_tokens in life.steps:
                share = max(0.0, min(start + seconds, last) - max(start, since))
                total += share
                tokens += step_tokens * share / seconds
        return total, tokens

    def phases(self) -> Phases:
        """Means over contributions to generations published in the counted time."""
        sums, count = [0.0] * 5, 0
        for published, pushed, _ in self._rounds:
            if published < self.since or not pushed:
                continue
            last = max(pushed.values())
            for name, at in pushed.items():
                found = self._around(name, at, published)
                if found is None:
                    continue
                trained, stopped, started = found
                gaps = (trained, at - stopped, last - at, published - last, started - published)
                sums = [a + b for a, b in zip(sums, gaps, strict=True)]
                count += 1
        if not count:
            return Phases()
        train, push, others, merger, adopt = (s / count for s in sums)
        return Phases(train=train, push=push, others=others, merger=merger, adopt=adopt)

    def _around(self, name: str, at: float, published: float) -> tuple[float, float, float] | None:
        """(seconds of the steps since the push before, end of the last one, start of the next)."""
        life = self.lives[name]
        index = bisect.bisect_left(life.steps, (at,))
        first = bisect.bisect_left(
            life.steps, (life.pushed[bisect.bisect_left(life.pushed, at) - 1],)
        )
        if first == index or index == len(life.steps) or life.steps[index][0] < published:
            return None
        start, seconds, _ = life.steps[index - 1]
        trained = sum(seconds for _, seconds, _ in life.steps[first:index])
        return trained, start + seconds, life.steps[index][0]
