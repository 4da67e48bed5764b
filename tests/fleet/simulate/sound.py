"""What every simulated run must end with: a clean ledger and a clean audit of the hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from diffurefill.fleet.audit import Audit, audit_run
from diffurefill.fleet.simulate.kernel import Process
from diffurefill.fleet.simulate.provenance import ExactAverager
from diffurefill.fleet.simulate.scenario import World


def expect_sound(world: World, folder: Path) -> Audit:
    """The ledger watched every version; the audit sees only what lies in the hub now."""
    assert world.violations == []
    audit = audit_run(world.hub, ExactAverager(), folder, lambda line: None)
    assert audit.verdict == "ok"
    assert audit.generations == world.gen
    return audit


@dataclass
class Script:
    """A plan told by the test: `rule(process, op, lane, n)` names the fault of the process's n-th
    operation of that kind, or None. Counts what it did in `told`."""

    rule: Callable[[Process, str, str, int], str | None]
    seconds_of: dict[str, float] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)

    def fault(self, process: Process, op: str, lane: str) -> str | None:
        n = self.counts[process.name, op]
        self.counts[process.name, op] += 1
        kind = self.rule(process, op, lane, n)
        if kind is not None:
            self.told[kind] += 1
        return kind

    def seconds(self, kind: str) -> float:
        return self.seconds_of.get(kind, 60.0)


def start(world: World, num_workers: int = 2) -> World:
    world.launch_merger()
    for number in range(num_workers):
        world.launch_worker(number)
    return world
