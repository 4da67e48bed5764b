"""The crash matrix: every process dies before and after every effect on the store, once.

Whatever happens, no accepted contribution is lost, none counts twice, no generation is half
published, and once the crashes stop the run goes on.
"""

from pathlib import Path

import pytest

from tests.fleet.fakes import Crash, CrashingStore, FakeFleet, MemoryStore
from tests.fleet.test_fleet import expect_sound

GENERATIONS = 3
BUDGETS = range(12)
"""A merger's first three generations take about a dozen effects; so do a worker's."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_merger_may_die_at_any_effect(tmp_path: Path, budget: int, after: bool) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    fleet.add_merger("doomed", CrashingStore(fleet.store, budget, after=after))
    fleet.add_worker(0)
    fleet.add_worker(1)
    fleet.run_until(lambda: "doomed" not in fleet.actors, seconds=300)
    assert "doomed" not in fleet.actors, "the budget must run out within the run"
    fleet.add_merger("next")
    assert fleet.until_generation(GENERATIONS, seconds=900)
    expect_sound(fleet)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_worker_may_die_at_any_effect(tmp_path: Path, budget: int, after: bool) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    fleet.add_merger()
    fleet.add_worker(0)
    try:
        fleet.add_worker(1, "doomed", CrashingStore(fleet.store, budget, after=after))
    except Crash:  # it died while it registered
        fleet.actors.pop("doomed", None)
    fleet.run_until(lambda: "doomed" not in fleet.actors, seconds=600)
    assert "doomed" not in fleet.actors, "the budget must run out within the run"
    fleet.add_worker(1, "again")
    before = fleet.state.gen
    assert fleet.until_generation(before + GENERATIONS, seconds=900)
    assert any(c.worker == 1 for c in fleet.state.accepted)
    expect_sound(fleet)


@pytest.mark.parametrize("budget", range(0, 30, 3))
def test_the_whole_fleet_may_vanish_twice(tmp_path: Path, budget: int) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    for life in range(2):
        doomed = CrashingStore(fleet.store, budget + 2, after=life == 0)
        fleet.add_merger(f"merger{life}", doomed)
        for n in (0, 1):
            try:
                fleet.add_worker(n, f"w{n}-{life}", doomed)
            except Crash:
                fleet.actors.pop(f"w{n}-{life}", None)
        fleet.run_until(lambda: not fleet.actors, seconds=400)
        fleet.actors.clear()
    fleet.add_merger("last")
    fleet.add_worker(0)
    fleet.add_worker(1)
    before = fleet.state.gen
    assert fleet.until_generation(before + 2, seconds=900)
    expect_sound(fleet)
