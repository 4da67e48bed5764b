"""Fake runs of every kind, for the tests of what is done to whole runs."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from diffurefill.fleet import records
from diffurefill.fleet.records import State
from diffurefill.fleet.rollback import rolling_back
from diffurefill.store.base import MAIN, read_json
from tests.fleet.fakes import FLEET, FakeAverager, FakeFleet, MemoryStore

KINDS: dict[str, dict[str, object]] = {
    "side averages": {"swa_from_step": 8, "snapshot_every": 2, "snapshot_keep": 2},
    "momentum": {"outer_step": "nesterov", "outer_momentum": 0.5},
    "downlink": {"downlink": "update"},
    "late": {"max_staleness": 2, "grace_seconds": 2.0, "min_fresh": 1},
    "compacting": {"compact_every": 2, "snapshot_every": 2},
}


def begun(folder: Path, **settings: object) -> FakeFleet:
    fleet = FakeFleet(MemoryStore(), folder, replace(FLEET, **settings))  # type: ignore[arg-type]
    if fleet.fleet.outer_step == "nesterov":
        fleet.averager = FakeAverager(Fraction(1, 2))
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    return fleet


def until(fleet: FakeFleet, gen: int) -> FakeFleet:
    """Up to the second publish of generation `gen`."""
    fleet.until_generation(gen)
    fleet.run_until(lambda: fleet.state.ema is not None and fleet.state.ema.gen >= gen)
    return fleet


def roll_back(fleet: FakeFleet, to: int | None) -> None:
    """A person does it while the fleet works."""
    cache, apply = fleet.folder / "rollback", fleet.averager.apply_update
    fleet.add("person", rolling_back(fleet.store, cache, to, fleet.said.append, apply))
    assert fleet.run_until(lambda: "person" not in fleet.actors)


def recorded(fleet: FakeFleet) -> list[State]:
    head = fleet.store.head(MAIN)
    paths = sorted(p for p in head.files if p.startswith(records.ROUNDS))
    return [records.state_from_json(read_json(fleet.store, head, p)["state"]) for p in paths]
