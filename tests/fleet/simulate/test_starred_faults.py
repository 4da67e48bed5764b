"""The eight faults of other systems that spec fleet.md 3 marks with a star, one test a number.

What stores do about them one by one is proved in tests/store; here a whole fleet meets them.
Number 7 runs the memory test of tests/fleet/test_averaging.py on eight uploads. Number 8, and
number 6 again on real rows, are in test_starred_training.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffurefill.fleet import records
from diffurefill.fleet.run import Run, read_state
from diffurefill.fleet.simulate import provenance
from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.kernel import Process
from diffurefill.fleet.simulate.scenario import FLEET, World
from diffurefill.store.base import MAIN, Version, sha256_file
from tests.fleet.simulate.sound import Script, expect_sound, start
from tests.fleet.test_averaging import (
    test_memory_grows_neither_with_the_model_nor_with_the_contributions as memory_of_a_merge,
)


@pytest.mark.parametrize("fault", ["lost_answer", "doubled"])
def test_1_a_publish_that_landed_although_the_answer_was_an_error_counts_once(
    tmp_path: Path, fault: str
) -> None:
    """Every publish of every process is answered 500, or 412 for its own success."""
    script = Script(lambda process, op, lane, n: fault if op == "publish" else None)
    world = start(World(1, tmp_path, plan=script))
    assert world.reaches(5, seconds=1500)
    assert script.told[fault] > 20
    assert [len(world.ledger.first[gen]["accepted"]) for gen in range(1, 6)] == [2] * 5
    assert world.ledger.state["epoch"] == 1
    assert world.ledger.rejected == {}
    expect_sound(world, tmp_path / "audit")


class PublishesBetween:
    """A hub whose main lane moves on right before the reader's operation number `at`."""

    def __init__(self, hub: SimHub, following: list[Version], at: int) -> None:
        self._hub, self._following, self._left = hub, following, at
        self.num_moved = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._hub, name)
        return self._between(method) if name in ("head", "poll", "read", "fetch") else method

    def _between(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            if self._left == 0 and self._following:
                version = self._following.pop(0)
                self._hub.publish(MAIN, version.files, expect=self._hub.head(MAIN))
                self.num_moved += 1
            else:
                self._left -= 1
            return method(*args)

        return call


def test_2_a_publish_between_two_reads_of_a_reader_never_mixes_versions(tmp_path: Path) -> None:
    world = start(World(2, tmp_path / "world"))
    assert world.reaches(4, seconds=1500)
    history = list(world.hub.history(MAIN))
    num_read = Counter[int]()
    for at in range(5):
        hub = SimHub()
        hub.blobs = world.hub.blobs
        hub.publish(MAIN, history[0].files, expect=None)
        store = PublishesBetween(hub, history[1:], at)
        run = Run(store, world.config, tmp_path / f"reader{at}", "{}")
        for _look in range(3):
            now = run.snapshot()
            version, state = now.version, now.state
            assert read_state(hub, version) == state
            assert version.files[records.GLOBAL] == state.global_weights
            got = run.fetch_global(now, provenance.apply_update)
            assert sha256_file(got) == state.global_weights
            assert state.ema is None or version.files[records.EMA] == state.ema.ref
            num_read[state.gen] += 1
        assert store.num_moved
    assert len(num_read) > 2


def test_3_a_bit_flip_of_the_same_size_is_fetched_again(tmp_path: Path) -> None:
    """Every download of every process is damaged on its first way; sizes are right."""
    script = Script(lambda process, op, lane, n: "flip" if op in ("fetch", "read") else None)
    world = start(World(3, tmp_path, plan=script))
    assert world.reaches(4, seconds=1500)
    assert script.told["flip"] > 30
    assert world.ledger.rejected == {}
    expect_sound(world, tmp_path / "audit")


def test_3_an_upload_damaged_for_good_is_refused_and_its_worker_tries_again(
    tmp_path: Path,
) -> None:
    def rule(process: Process, op: str, lane: str, n: int) -> str | None:
        return "damaged" if process.name.startswith("w0") and op == "stage" and n == 0 else None

    world = start(World(3, tmp_path, plan=Script(rule)))
    assert world.reaches(3, seconds=1500)
    assert list(world.ledger.rejected.values()) == ["corrupt"]
    [refused] = world.ledger.rejected
    rows = sorted(rows_of(world, slot=0))
    assert rows[0] == (0, 4)
    assert (0, refused[1], refused[2] + 1) in world.ledger.accepted
    assert world.violations == []  # the audit would rightly find the damaged file


def rows_of(world: World, slot: int) -> list[tuple[int, int]]:
    """The rows of every payload that was merged, by what it was really trained on."""
    found = []
    for state in world.ledger.first.values():
        for c in state["accepted"]:
            delta = provenance.load_delta(world.hub.blobs[c["payload"]["sha256"]])
            if delta.slot == slot:
                found.append(delta.rows)
    return found


class Sleepy:
    """Holds the process up at its step number `at`, once, for ten minutes."""

    def __init__(self, name: str, at: int) -> None:
        self._name, self._left = name, at

    def after_step(self, process: Process, wait: float) -> float:
        if process.name == self._name:
            self._left -= 1
            if self._left == 0:
                return wait + 600.0
        return wait


def test_4_a_squash_during_a_download_makes_the_reader_look_again(tmp_path: Path) -> None:
    """The reader sleeps once between two of its steps; meanwhile what it wants vanishes."""
    fleet = replace(FLEET, compact_every=1, min_fresh=1)
    vanished = []
    for at in range(14, 26):  # the second adoption is among them
        folder = tmp_path / str(at)
        world = World(4, folder, fleet, nemesis=Sleepy("w1#3", at), keep_trace=True)
        start(world)
        assert world.reaches(9, seconds=3600)
        assert world.kernel.run(world.kernel.now + 900, world.agrees)
        assert [p.name for p in world.kernel.processes if not p.alive] == []
        vanished += [t for t in world.kernel.trace if " w1#3 " in t and t.endswith("NotFound")]
        expect_sound(world, folder / "audit")
    assert vanished


def test_4_a_quota_that_is_full_is_waited_for_and_nothing_is_lost(tmp_path: Path) -> None:
    world = start(World(4, tmp_path, hub_commits_per_hour=24))
    assert world.kernel.run(6 * 3600.0) is False
    assert world.hub.num_refused > 0
    assert world.gen >= 12
    assert all(p.alive for p in world.kernel.processes)
    expect_sound(world, tmp_path / "audit")


@pytest.mark.parametrize("steps", range(4, 30, 2))
def test_5_a_worker_restarted_between_pull_and_push_starts_from_the_newest_global(
    tmp_path: Path, steps: int
) -> None:
    """Killed after so many steps of its own, and started again three generations later."""
    world = World(5, tmp_path, replace(FLEET, min_fresh=1))
    world.launch_merger()
    world.launch_worker(0)
    doomed = world.launch_worker(1)
    real, left = world.kernel.step, [steps]

    def step(process: Process) -> float | None:
        if process is doomed:
            left[0] -= 1
            if left[0] < 0:
                world.kernel.kill(doomed)
                return None
        return real(process)

    world.kernel.step = step  # type: ignore[method-assign]
    assert world.kernel.run(2000.0, lambda: not doomed.alive)
    assert world.reaches(world.gen + 3, seconds=1500)
    heir = world.launch_worker(1)
    assert world.kernel.run(world.kernel.now + 400, lambda: heir.name in world.learners)
    assert world.reaches(world.gen + 3, seconds=1500)
    assert world.learners[heir.name].adopted[0] > 0
    expect_sound(world, tmp_path / "audit")


@pytest.mark.parametrize("kind", ["other weights", "other rows"])
def test_5_a_contribution_to_other_weights_than_the_global_is_refused(
    tmp_path: Path, kind: str
) -> None:
    world = start(World(5, tmp_path))
    assert world.reaches(2, seconds=900)
    world.launch_liar(7, kind)
    assert world.kernel.run(world.kernel.now + 400, lambda: bool(world.ledger.rejected))
    expected = {"other weights": "stale_base", "other rows": "slot_cursor"}[kind]
    assert list(world.ledger.rejected.values()) == [expected]
    assert world.reaches(world.gen + 2, seconds=900)
    expect_sound(world, tmp_path / "audit")


def test_6_a_worker_killed_and_resumed_again_and_again_repeats_no_row_and_skips_none(
    tmp_path: Path,
) -> None:
    world = World(6, tmp_path)
    world.launch_merger()
    world.launch_worker(1)
    for life in range(12):
        worker = world.launch_worker(0)
        world.kernel.run(world.kernel.now + 23.0 + 17.0 * life)  # another moment in each life
        world.kernel.kill(worker)
    world.launch_worker(0)
    assert world.reaches(world.gen + 3, seconds=1500)
    rows = sorted(rows_of(world, slot=0))
    assert len(rows) >= 8
    assert [first for first, _ in rows] == [0, *(last for _, last in rows[:-1])]
    expect_sound(world, tmp_path / "audit")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_7_a_merge_of_eight_uploads_fits_into_a_few_chunks_of_memory(tmp_path: Path) -> None:
    memory_of_a_merge(tmp_path, "fp32-delta", 8)
