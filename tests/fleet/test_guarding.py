"""Contributions that are refused by their bytes, and what their workers learn of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.fleet.run import read_state
from diffurefill.store.base import MAIN
from tests.fleet.fakes import FLEET, FakeFleet, FakeGuard, MemoryStore
from tests.fleet.test_fleet import expect_sound


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    """Rounds of three."""
    fleet = FakeFleet(MemoryStore(), tmp_path, replace(FLEET, min_fresh=3))
    fleet.guard = FakeGuard()
    fleet.add_merger()
    return fleet


def reasons(fleet: FakeFleet) -> set[tuple[int, str]]:
    states = (read_state(fleet.store, version) for version in fleet.store.history(MAIN))
    return {(r.worker, r.reason) for state in states for r in state.rejected}


def run_until_worker_gives_up(fleet: FakeFleet, reason: str) -> None:
    with pytest.raises(UserError, match=f"rejected \\({reason}\\) 3 times in a row"):
        fleet.run_until(lambda: False, seconds=3000)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [({"big": 1000}, "norm"), ({"against": 1}, "cosine"), ({"poison": 1}, "guard")],
)
def test_one_bad_worker_of_three_is_refused_and_the_others_go_on(
    fleet: FakeFleet, extra: dict[str, int], reason: str
) -> None:
    fleet.add_worker(0)
    fleet.add_worker(1)
    bad = fleet.add_worker(2, extra=extra)
    run_until_worker_gives_up(fleet, reason)
    assert fleet.state.gen >= 2
    assert reasons(fleet) == {(2, reason)}
    assert bad.num_resets == 2
    assert all(c.worker != 2 for c in fleet.accepted())
    fleet.kill("w2")
    assert fleet.until_generation(fleet.state.gen + 1)
    expect_sound(fleet)


def test_a_lone_poisoned_contribution_is_refused(fleet: FakeFleet) -> None:
    fleet.add_worker(0, extra={"poison": 1})
    run_until_worker_gives_up(fleet, "guard")
    assert fleet.state.gen == 0
    assert reasons(fleet) == {(0, "guard")}


def test_a_long_delta_is_known_by_those_before_it(fleet: FakeFleet) -> None:
    learner = fleet.add_worker(0)
    assert fleet.until_generation(5)
    learner.extra = {"big": 1000}
    run_until_worker_gives_up(fleet, "norm")
    assert fleet.accepted()[-1].base_gen <= 5


def test_a_global_that_no_single_contribution_explains_is_held_back(fleet: FakeFleet) -> None:
    for number in range(3):
        fleet.add_worker(number, extra={"poison": 1})
    fleet.run_until(lambda: bool(fleet.state.alert), seconds=500)
    assert "generation 1 is held back" in fleet.state.alert
    asked = fleet.guard.num_asked
    fleet.run_until(lambda: False, seconds=500)
    assert (fleet.state.gen, fleet.guard.num_asked) == (0, asked)  # not scored again and again
    assert reasons(fleet) == set()
    fleet.kill("merger")
    fleet.guard = None
    fleet.add_merger("unguarded")
    assert fleet.until_generation(1)
    assert fleet.state.alert == ""


def test_the_guard_scores_each_global_once(fleet: FakeFleet) -> None:
    for number in range(3):
        fleet.add_worker(number)
    assert fleet.until_generation(6)
    assert fleet.guard.num_asked == 1 + 6
    assert fleet.state.guard_ce == pytest.approx(7.0 - 0.01 * fleet.state.gen, abs=0.02)


def test_a_fleet_that_starts_again_is_not_refused_for_its_first_long_steps(
    fleet: FakeFleet,
) -> None:
    """Everybody is lost when steps have become short; new moments make long ones for a while."""
    learners = [fleet.add_worker(n) for n in range(3)]
    assert fleet.until_generation(30, seconds=9000)
    for learner in learners:
        fleet.kill(f"w{learner.number}")
    for n in range(3):
        fleet.add_worker(n, f"again{n}", extra={"long": 8})
    before = fleet.state.gen
    assert fleet.until_generation(before + 3)
    assert reasons(fleet) == set()
    assert fleet.state.norms[-1] == pytest.approx(65**0.5)
