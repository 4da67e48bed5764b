"""A hub that allows so many commits an hour: the fleet lives within it (I17)."""

from dataclasses import replace
from pathlib import Path

from diffurefill.fleet.simulate.kernel import Costs
from diffurefill.fleet.simulate.scenario import FLEET, World

REAL = replace(
    FLEET, lease_seconds=300.0, log_seconds=300.0, live_seconds=1800.0, grace_seconds=150.0
)
"""Rounds of eight minutes, as on free notebooks."""
PER_HOUR = 64


def six_hours(folder: Path, *, known_limit: int) -> World:
    fleet = replace(REAL, commits_per_hour=known_limit)
    world = World(1, folder, fleet, Costs(step_seconds=110.0), hub_commits_per_hour=PER_HOUR)
    world.launch_merger()
    for number in range(4):
        world.launch_worker(number, speed=1.0 + 0.1 * number)
    world.kernel.run(6 * 3600.0)
    assert world.violations == []
    return world


def test_logs_and_beats_give_way_so_that_no_generation_waits(tmp_path: Path) -> None:
    """Four workers and the merger need 44 commits an hour here, and would make 105."""
    world = six_hours(tmp_path, known_limit=PER_HOUR)
    assert world.gen >= 40
    assert world.hub.num_refused < 20


def test_a_fleet_that_does_not_know_the_limit_loses_time_but_nothing_else(tmp_path: Path) -> None:
    world = six_hours(tmp_path, known_limit=0)
    assert 20 <= world.gen < 35
    assert world.hub.num_refused > 100
