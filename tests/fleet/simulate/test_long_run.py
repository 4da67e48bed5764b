"""Two days of notebooks that come and go: the audit of what is left, over every invariant."""

from pathlib import Path

import pytest

from diffurefill.fleet.audit import INVARIANTS
from diffurefill.fleet.simulate.long_run import Figures, LongRun

NOT_SHOWN = {"I13"}
"""Memory is not visible in a store."""


def live(folder: Path, *, hours: float, losses: int) -> tuple[LongRun, Figures]:
    run = LongRun(1, folder, hours=hours, workers=8, losses=losses)
    return run, run.run()


def expect_sound(found: Figures) -> None:
    assert found.violations == []
    assert found.verdict == "ok"
    assert set(found.rejected) <= {"stale_base"}
    assert 0 < found.epochs <= found.merger_launches
    assert 8.5 < found.median_round_minutes < 10.5
    assert found.accepted > 5 * found.generations


def test_half_a_day_of_a_fleet_that_comes_and_goes_is_sound(tmp_path: Path) -> None:
    _, found = live(tmp_path, hours=12.0, losses=1)
    expect_sound(found)
    assert found.generations > 50
    assert found.worker_launches > 45
    assert set(INVARIANTS) - set(found.checks) <= NOT_SHOWN


@pytest.mark.slow
def test_two_days_with_two_hundred_launches_and_three_losses_are_sound(tmp_path: Path) -> None:
    _, found = live(tmp_path, hours=48.0, losses=3)
    expect_sound(found)
    assert found.worker_launches >= 200
    assert found.fleet_losses == 3
    assert found.generations > 220


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    first, second = (live(tmp_path / n, hours=2.0, losses=0) for n in ("a", "b"))
    assert first[1] == second[1]
    assert first[0].world.kernel.trace_hash == second[0].world.kernel.trace_hash
