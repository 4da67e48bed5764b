"""The report's three rules, each learned from work that was lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffurefill.fleet import records
from diffurefill.fleet.records import Rejected
from diffurefill.fleet.run import read_state
from diffurefill.store.base import MAIN, Busy, read_json
from tests.fleet.damage import audit
from tests.fleet.fakes import FLEET, FakeFleet, FrozenHead, MemoryStore
from tests.fleet.runs import begun, roll_back, until


class Unreachable:
    """A worker's connection: half of the time nothing gets through but what it pushes."""

    def __init__(self, store: MemoryStore, clock: Callable[[], float]) -> None:
        self._store, self._clock, self.num_failures = store, clock, 0
        self.drops = False
        self.uri = store.uri

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.drops and self._clock() % 60 < 30:
                self.num_failures += 1
                raise Busy("no route to host", 5.0)
            return method(*args, **kwargs)

        return method if name in ("publish", "lookup", "stage") else call


def test_rule_i_a_worker_is_dead_when_its_pushed_log_stands_still_and_never_before(
    tmp_path: Path,
) -> None:
    """Twice a healthy fleet was declared dead because its endpoints dropped in bursts."""
    fleet = FakeFleet(MemoryStore(), tmp_path)
    hub = Unreachable(fleet.store, fleet.clock)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1, store=hub)
    fleet.until_generation(2)
    hub.drops = True
    assert fleet.until_generation(8, seconds=5000)
    assert hub.num_failures > 20
    assert [[c.worker for c in s.accepted] for s in fleet.states()[3:]] == [[0, 1]] * 6
    assert all(s.live == (0, 1) for s in fleet.states()[3:])
    fleet.kill("w1")
    died = fleet.clock.now
    assert fleet.run_until(lambda: fleet.state.live == (0,), seconds=5000)
    assert fleet.clock.now - died <= FLEET.live_seconds + FLEET.grace_seconds
    assert audit(fleet).violations == []


def test_rule_i_a_worker_that_only_waits_is_alive(tmp_path: Path) -> None:
    """It pushes its log while it waits, longer than anyone may be silent, for a slow one."""
    fleet = FakeFleet(MemoryStore(), tmp_path)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.ticks["w1"] = 15.0
    fleet.add_worker(1)
    assert fleet.until_generation(6, seconds=5000)
    states = [read_state(fleet.store, version) for version in fleet.store.history(MAIN)]
    waiting = [s for s in states if 3 <= s.gen < 6]
    assert len(waiting) > 15  # beats
    assert {s.live for s in waiting} == {(0, 1)}


@pytest.mark.parametrize("num_left", [1, 2])
def test_rule_ii_what_a_dead_fleet_had_pushed_is_merged_before_new_workers_are_seeded(
    tmp_path: Path, num_left: int
) -> None:
    """Interval checkpoints of dead machines are valid contributions: the merger comes first."""
    fleet = until(begun(tmp_path), 2)
    fleet.kill("merger")
    gen = fleet.state.gen
    for worker in range(2):
        if worker >= num_left:
            fleet.kill(f"w{worker}")
    pushed = lambda: num_left == len(leftovers(fleet, gen))  # noqa: E731
    assert fleet.run_until(pushed, seconds=500)
    fleet.actors.clear()
    left = leftovers(fleet, gen)
    began = fleet.clock.now
    fleet.add_merger("next")
    assert fleet.until_generation(gen + 1)
    assert {c.identity for c in fleet.state.accepted} == {c.identity for c in left}
    assert fleet.clock.now - began <= FLEET.lease_seconds + FLEET.grace_seconds + 20
    new = [fleet.add_worker(n, f"new{n}") for n in (2, 3)]
    assert fleet.until_generation(gen + 3)
    assert all(learner.adopted[0][0] == gen + 1 for learner in new)
    assert audit(fleet).violations == []


def leftovers(fleet: FakeFleet, gen: int) -> list[records.Contribution]:
    """Contributions to generation `gen` that lie on the workers' lanes."""
    found = []
    for worker in range(3):
        if fleet.has_pushed(worker):
            version = fleet.store.head(records.lane_of(worker))
            path = records.worker_paths(worker).manifest
            manifest = read_json(fleet.store, version, path)
            found.append(records.contribution_from_json(manifest))
    return [c for c in found if c.base_gen == gen]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_rule_iii_uploads_in_flight_are_stale_after_a_rollback_even_on_the_same_bytes(
    tmp_path: Path, max_staleness: int
) -> None:
    """A stale checkpoint with the right tag was once averaged into a re-published global.

    Workers 0 and 1 worked on generation 4. Worker 2 worked on 3, and 3 is what is restored: it
    started from the very bytes that are now the global, and is refused all the same.
    """
    fleet = until(begun(tmp_path, max_staleness=max_staleness, min_fresh=1, live_seconds=20.0), 3)
    hub = FrozenHead(fleet.store)
    hub.freeze()
    fleet.ticks["w2"] = 10.0
    fleet.add_worker(2, store=hub)
    until(fleet, 4)
    fleet.kill("merger")
    in_flight = lambda: [*leftovers(fleet, 4), *leftovers(fleet, 3)]  # noqa: E731
    assert fleet.run_until(lambda: {c.worker for c in in_flight()} == {0, 1, 2}, seconds=500)
    stale, target = in_flight(), fleet.states()[3]
    fleet.actors.clear()
    roll_back(fleet, 3)
    assert fleet.state.global_weights == target.global_weights
    same_tag = next(c for c in stale if c.worker == 2)
    assert same_tag.base_sha256 == fleet.state.global_weights.sha256
    fleet.add_merger("next")
    fleet.run_until(lambda: False, seconds=60)
    assert fleet.state.gen == 5
    fleet.add_worker(0, "new0")
    assert fleet.until_generation(8)
    assert not {c.identity for c in stale} & {c.identity for c in fleet.accepted()}
    assert set(fleet.states()[6].rejected) == {refusal(c) for c in stale}
    assert fleet.states()[6].cursors["0"] == {"rows": target.cursors["0"]["rows"] + 4}
    assert audit(fleet).violations == []
    assert audit(fleet).checks["I15"] >= 3


def refusal(c: records.Contribution) -> Rejected:
    return Rejected(
        worker=c.worker,
        incarnation=c.incarnation,
        seq=c.seq,
        base_gen=c.base_gen,
        reason="stale_base",
    )


def test_rule_iii_workers_that_lived_through_a_rollback_start_again_from_it(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path), 4)
    fleet.kill("merger")
    assert fleet.run_until(lambda: len(leftovers(fleet, 4)) == 2, seconds=100)
    late = leftovers(fleet, 4)
    roll_back(fleet, 2)
    fleet.add_merger("next")
    assert fleet.until_generation(7)
    restored = fleet.states()[5]
    assert restored.restored_from == 2
    assert not {c.identity for c in late} & {c.identity for c in fleet.accepted()}
    assert [[c.base_gen for c in s.accepted] for s in fleet.states()[6:]] == [[5, 5], [6, 6]]
    assert sum("late gen 4" in line for line in fleet.said) == 2
    assert audit(fleet).violations == []
