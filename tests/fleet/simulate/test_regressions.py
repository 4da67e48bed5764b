"""Faults of the fleet that the simulator found, each at its smallest."""

from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.fleet.records import GLOBAL
from diffurefill.fleet.simulate.connection import flipped
from diffurefill.fleet.simulate.kernel import Costs
from diffurefill.fleet.simulate.scenario import FLEET, World
from diffurefill.store.base import MAIN

QUICK = Costs(latency_seconds=0.02, upload_bytes_per_second=1e11, download_bytes_per_second=1e11)


@pytest.mark.parametrize("seed", range(6))
def test_a_drifting_worker_reads_the_rows_of_a_rolled_back_push_again(
    tmp_path: Path, seed: int
) -> None:
    """Merged and rolled back between two looks of a worker: its drift came after those rows."""
    fleet = replace(FLEET, adoption="keep_drift", min_fresh=1, poll_seconds=30.0)
    world = World(seed, tmp_path, fleet, QUICK)
    world.launch_merger()
    world.launch_worker(0)
    assert world.reaches(3, seconds=600)
    world.launch_roll_back()
    assert world.reaches(world.gen + 4, seconds=1200)
    assert world.violations == []


def test_weights_damaged_in_the_store_are_named_with_the_way_out(tmp_path: Path) -> None:
    world = World(1, tmp_path)
    world.launch_merger()
    world.launch_worker(0)
    assert world.reaches(2, seconds=600)
    head = world.hub.head(MAIN)
    assert head is not None
    sha256 = head.ref(GLOBAL).sha256
    world.hub.damaged[sha256] = flipped(world.hub.blobs[sha256])
    newcomer = world.launch_worker(1)
    world.kernel.run(world.kernel.now + 60, lambda: not newcomer.alive)
    assert newcomer.ending is not None
    assert newcomer.ending.startswith("Corrupt: memory:: weights are damaged in the store")
    assert "diffurefill rollback memory:" in newcomer.ending
