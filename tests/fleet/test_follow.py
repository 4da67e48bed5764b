"""What follows each global: EMA, SWA, snapshots, the late whole file of an update, compaction."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from diffurefill.config import FleetConfig
from diffurefill.fleet import records
from diffurefill.store.base import MAIN
from tests.fleet.fakes import FLEET, FakeFleet, MemoryStore, read_weights
from tests.fleet.test_fleet import expect_sound


def make(tmp_path: Path, **changes: object) -> FakeFleet:
    fleet = FakeFleet(MemoryStore(), tmp_path, replace(FLEET, **changes))
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    return fleet


def settle(fleet: FakeFleet, gen: int) -> None:
    """Until generation `gen` is there with all that follows it."""
    assert fleet.until_generation(gen)
    fleet.run_until(lambda: fleet.state.ema is not None and fleet.state.ema.gen >= gen)


def weights(fleet: FakeFleet, path: str) -> dict[str, Fraction]:
    head = fleet.store.head(MAIN)
    assert head is not None
    return read_weights(fleet.store.fetch(head.ref(path), fleet.folder / "x"))


def globals_of(fleet: FakeFleet) -> Iterator[dict[str, Fraction]]:
    for state in fleet.states():
        yield read_weights(fleet.store.fetch(state.global_weights, fleet.folder / "x"))


def test_the_swa_is_the_plain_mean_of_the_globals_from_its_step_on(tmp_path: Path) -> None:
    fleet = make(tmp_path, swa_from_step=3 * FLEET.local_steps)
    settle(fleet, 5)
    last_three = list(globals_of(fleet))[3:6]
    assert fleet.state.swa is not None
    assert (fleet.state.swa.count, fleet.state.swa.gen) == (3, 5)
    keys = set().union(*last_three)
    mean = {k: sum(g.get(k, Fraction(0)) for g in last_three) / 3 for k in keys}
    assert weights(fleet, records.SWA) == mean
    expect_sound(fleet)


def test_snapshots_are_copies_of_their_generation_and_old_ones_go(tmp_path: Path) -> None:
    fleet = make(tmp_path, snapshot_every=2, snapshot_keep=2)
    settle(fleet, 6)
    assert [s.gen for s in fleet.state.snapshots] == [4, 6]
    files = fleet.store.head(MAIN).files
    assert sorted(f for f in files if f.startswith("snap/")) == [
        "snap/00000004.safetensors",
        "snap/00000006.safetensors",
    ]
    assert weights(fleet, records.snapshot_path(4)) == list(globals_of(fleet))[4]
    expect_sound(fleet)


def test_an_update_is_published_first_and_the_whole_global_follows(tmp_path: Path) -> None:
    fleet = make(tmp_path, downlink="update")
    settle(fleet, 4)
    behind = [v for v in fleet.store.history(MAIN) if v.files[records.GLOBAL] == fleet.states()[3]
              .global_weights]  # fmt: skip
    assert behind
    assert fleet.state.full_gen == 4
    assert fleet.store.head(MAIN).files[records.GLOBAL] == fleet.state.global_weights
    expect_sound(fleet)


def test_a_worker_makes_the_global_from_the_update_byte_for_byte(tmp_path: Path) -> None:
    """The merger dies between the two publishes: only the update of generation 2 is there."""
    fleet = make(tmp_path, downlink="update")
    fleet.run_until(lambda: fleet.state.gen == 2)
    assert fleet.state.full_gen == 1
    fleet.kill("merger")
    late = fleet.add_worker(2)
    fleet.run_until(lambda: bool(late.adopted))
    assert late.adopted == [(2, fleet.state.global_weights.sha256)]
    assert fleet.state.global_weights.sha256 not in fleet.store.blobs
    fleet.add_merger("next")
    settle(fleet, 4)
    expect_sound(fleet)


def test_compaction_gives_back_old_globals_and_payloads(tmp_path: Path) -> None:
    fleet = make(tmp_path, compact_every=2)
    settle(fleet, 9)
    kept = sum(state.global_weights.sha256 in fleet.store.blobs for state in fleet.states())
    assert kept <= 4
    assert fleet.state.compacted_gen >= 6
    payloads = {c.payload.sha256 for c in fleet.accepted()}
    assert len(payloads & set(fleet.store.blobs)) <= 8
    expect_sound(fleet)


@pytest.mark.parametrize("fleet_config", [replace(FLEET, commits_per_hour=60)])
def test_a_part_of_the_commits_silences_logs_before_contributions(
    tmp_path: Path, fleet_config: FleetConfig
) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, replace(fleet_config, log_seconds=5.0))
    for number in range(3):
        fleet.add_worker(number)
    fleet.run_until(lambda: False, seconds=3600)  # no merger: all wait, and would push logs
    commits = [len(list(fleet.store.history(f"w-0{n}"))) for n in range(3)]
    assert max(commits) <= 60
    fleet.add_merger()
    assert fleet.until_generation(3)
