"""The report's run in miniature: two days of notebooks that come and go, in virtual time.

Workers live one to two and a half hours and are started again minutes later, under their number;
so is the merger. Three times everybody is lost at one moment and nobody comes back for a while.
Rounds take about nine minutes, as the report's did. Nothing else goes wrong: other faults are
chaos.py's. Source: spec fleet.md 2.1 and the report's rules.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from diffurefill.config import FleetConfig
from diffurefill.fleet.audit import audit_run
from diffurefill.fleet.simulate.kernel import Costs, Process
from diffurefill.fleet.simulate.profiles import HOUR, MINUTE
from diffurefill.fleet.simulate.provenance import ExactAverager
from diffurefill.fleet.simulate.scenario import World

FLEET = FleetConfig(
    local_steps=5,
    min_partial_steps=2,
    grace_seconds=150.0,
    lease_seconds=300.0,
    live_seconds=1800.0,
    poll_seconds=10.0,
    log_seconds=300.0,
    guard_rows=0,
    snapshot_every=20,
    swa_from_step=400,
    ema_decay=0.5,  # exact fractions stay short
)
COSTS = Costs(model_bytes=4.32e9, payload_bytes=1.1e9, step_seconds=70.0)
"""A 1.08B model, int8 contributions, the report's 150 steps as five of 70 s."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    hours: float
    generations: int
    tokens: int
    accepted: int
    rejected: dict[str, int]
    """By reason."""
    worker_launches: int
    merger_launches: int
    fleet_losses: int
    epochs: int
    versions: int
    """Of the main lane."""
    median_round_minutes: float
    """Between two generations."""
    events: int
    verdict: str
    """Of the audit of what lies in the hub at the end."""
    checks: dict[str, int]
    """By invariant: how often the audit checked it."""
    violations: list[str] = field(default_factory=list)
    """The ledger's, which saw every version as it came."""


class LongRun:
    def __init__(self, seed: int, folder: Path, *, hours: float, workers: int, losses: int) -> None:
        self._folder, self._hours = folder, hours
        self._workers, self._losses = workers, losses
        self.world = World(seed, folder / "world", FLEET, COSTS)
        self._kernel = self.world.kernel
        self._launched = Counter[str]()
        self._published: dict[int, float] = {}
        self._dark_until = 0.0
        self.world.hub.on_publish.append(lambda version, writer: self._note_round())

    def run(self) -> Figures:
        self._start("merger", 0.0)
        for number in range(self._workers):
            self._start(f"w{number}", 60.0 * number)
        for loss in range(self._losses):
            self._kernel.at((loss + 1) * self._hours * HOUR / (self._losses + 1), self._lose_all)
        self._kernel.run(self._hours * HOUR)
        return self._figures()

    # --- who lives when --------------------------------------------------------------------------

    def _start(self, kind: str, after: float) -> None:
        self._kernel.at(self._kernel.now + after, lambda: self._launch(kind))

    def _launch(self, kind: str) -> None:
        if self._kernel.now < self._dark_until:
            self._start(kind, self._dark_until - self._kernel.now)
            return
        self._launched[kind[0]] += 1
        if kind == "merger":
            process = self.world.launch_merger()
        else:
            process = self.world.launch_worker(int(kind[1:]), speed=self._speed(kind))
        life = self._kernel.chance.uniform(1.0, 2.6) * HOUR
        self._kernel.at(self._kernel.now + life, lambda: self._end(kind, process))

    def _speed(self, kind: str) -> float:
        """A number is a kind of machine: two are fast, the rest within a tenth of each other."""
        return 1.2 if int(kind[1:]) < 2 else 1.0 + 0.02 * (int(kind[1:]) % 5)

    def _end(self, kind: str, process: Process) -> None:
        if process.alive:
            self._kernel.kill(process)
            self._start(kind, self._kernel.chance.uniform(1.0, 5.0) * MINUTE)

    def _lose_all(self) -> None:
        self._dark_until = self._kernel.now + self._kernel.chance.uniform(20.0, 90.0) * MINUTE
        for process in [p for p in self._kernel.processes if p.alive]:
            self._end(process.name.partition("#")[0], process)

    # --- what came of it -------------------------------------------------------------------------

    def _note_round(self) -> None:
        self._published.setdefault(self.world.gen, self._kernel.now)

    def _figures(self) -> Figures:
        world, ledger = self.world, self.world.ledger
        audit = audit_run(world.hub, ExactAverager(), self._folder / "audit", lambda line: None)
        times = sorted(self._published.values())
        rounds = sorted(b - a for a, b in itertools.pairwise(times))
        return Figures(
            hours=self._hours,
            generations=world.gen,
            tokens=ledger.state["tokens"],
            accepted=len(ledger.accepted),
            rejected=dict(Counter(ledger.rejected.values())),
            worker_launches=self._launched["w"],
            merger_launches=self._launched["m"],
            fleet_losses=self._losses,
            epochs=ledger.state["epoch"],
            versions=audit.versions,
            median_round_minutes=round(rounds[len(rounds) // 2] / MINUTE, 2),
            events=self._kernel.events,
            verdict=audit.verdict,
            checks=dict(sorted(audit.checks.items())),
            violations=world.violations,
        )
