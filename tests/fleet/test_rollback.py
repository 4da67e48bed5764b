"""Returning to an earlier generation: what comes with it, what is refused, what is damaged."""

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.fleet import records
from diffurefill.fleet.manage import compacting
from diffurefill.fleet.records import State
from diffurefill.fleet.rollback import rolling_back
from diffurefill.fleet.run import Snapshot, read_state
from diffurefill.fleet.weights import globals_back
from diffurefill.store.base import MAIN
from tests.fleet.damage import audit, damage
from tests.fleet.fakes import FakeFleet, read_weights
from tests.fleet.runs import KINDS, begun, roll_back, until


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return until(begun(tmp_path), 4)


def stop(fleet: FakeFleet) -> FakeFleet:
    fleet.actors.clear()
    return fleet


def spoil_state(fleet: FakeFleet) -> None:
    """The newest version's state.json is published as nonsense."""
    fleet.store.publish(MAIN, {records.STATE: b"{"}, expect=fleet.store.head(MAIN))


def work_on(fleet: FakeFleet) -> None:
    """A new fleet goes on from where the run stands, and leaves it sound."""
    before = fleet.state.gen
    for name, add in (("m2", fleet.add_merger), ("w0b", fleet.add_worker)):
        add(name) if name == "m2" else add(0, name)  # type: ignore[arg-type]
    assert fleet.until_generation(before + 2)
    assert audit(fleet).violations == []


def test_a_rollback_is_a_new_generation_with_the_old_one_s_everything(fleet: FakeFleet) -> None:
    ended = read_state(fleet.store, last_of(fleet, 2))
    before = stop(fleet).state
    roll_back(fleet, 2)
    now, head = fleet.state, fleet.store.head(MAIN)
    assert (now.gen, now.restored_from, now.parent_gen) == (5, 2, 2)
    for name in ("global_weights", "step", "tokens", "cursors", "norms", "guard_ce"):
        assert getattr(now, name) == getattr(ended, name)
    assert (now.ema.ref, now.ema.count, now.ema.gen) == (ended.ema.ref, 2, 5)
    assert (now.epoch, now.merger_id) == (before.epoch + 1, "")
    assert now.roster == before.roster
    assert head.files[records.GLOBAL] == now.global_weights
    assert fleet.said[-1].startswith("generation 5 restores generation 2: step 8, 160 tokens")
    assert not list((fleet.folder / "rollback").iterdir())
    work_on(fleet)


def last_of(fleet: FakeFleet, gen: int) -> Any:
    found = [v for v in fleet.store.history(MAIN) if read_state(fleet.store, v).gen == gen]
    return found[-1]


def test_a_live_merger_stands_by_and_goes_on_from_the_rollback(fleet: FakeFleet) -> None:
    epoch = fleet.state.epoch
    roll_back(fleet, 2)
    restored = fleet.state.gen
    assert fleet.until_generation(restored + 3)
    assert any("took over" in line for line in fleet.said)
    assert fleet.state.epoch == epoch + 2
    assert audit(fleet).violations == []


def test_a_rollback_while_the_merger_averages_beats_its_publish(tmp_path: Path) -> None:
    """Between `averaged` and its publish the person comes first: that generation never was."""
    fleet = begun(tmp_path)
    fleet.kill("merger")
    averaged: list[State] = []

    def person(event: str, state: State) -> None:
        if event == "averaged" and state.gen == 3 and not averaged:
            averaged.append(state)
            cache, apply = tmp_path / "cache", fleet.averager.apply_update
            for _ in rolling_back(fleet.store, cache, 1, fleet.said.append, apply):
                pass

    fleet.add_merger("merger", on_event=person)
    assert fleet.until_generation(6)
    lost = {c.identity for c in averaged[0].accepted}
    assert lost
    assert not lost & {c.identity for c in fleet.accepted()}
    assert fleet.states()[3].restored_from == 1
    assert sum("took over" in line for line in fleet.said) == 1
    assert audit(fleet).violations == []


def test_an_untrained_generation_is_no_global_of_last_k(fleet: FakeFleet) -> None:
    roll_back(stop(fleet), 0)
    version = fleet.store.head(MAIN)
    assert version is not None
    run = fleet.run_for("reader")
    assert list(globals_back(run, Snapshot(version, fleet.state))) == []


def test_without_a_target_it_is_the_generation_before(fleet: FakeFleet) -> None:
    roll_back(stop(fleet), None)
    assert fleet.state.restored_from == 3
    roll_back(fleet, None)  # 5 has the weights of 3, so this goes on to 2
    assert fleet.state.restored_from == 2
    roll_back(fleet, None)
    roll_back(fleet, None)
    assert fleet.state.restored_from == 0
    with pytest.raises(UserError, match="no generation before"):
        roll_back(fleet, None)
    work_on(fleet)


@pytest.mark.parametrize("to", [-1, 5, 99])
def test_a_generation_that_never_was_is_refused(fleet: FakeFleet, to: int) -> None:
    with pytest.raises(UserError, match=f"generation {to} is not in .* 0 to 4"):
        roll_back(stop(fleet), to)


def test_weights_that_are_gone_are_refused_and_the_others_named(tmp_path: Path) -> None:
    fleet = stop(until(begun(tmp_path, compact_every=4, snapshot_every=2), 5))
    with pytest.raises(UserError, match=r"generation 1 are gone.*: 2, every generation from 4 on"):
        roll_back(fleet, 1)
    roll_back(fleet, 2)  # from its snapshot
    assert fleet.state.restored_from == 2
    assert fleet.state.ema is None
    assert any("EMA of that generation is gone" in line for line in fleet.said)
    assert [s.gen for s in fleet.state.snapshots] == [2]
    work_on(fleet)
    assert fleet.state.ema.count <= 3


def test_damaged_weights_are_never_restored(fleet: FakeFleet) -> None:
    damage(fleet, fleet.states()[2].global_weights)
    with pytest.raises(UserError, match="weights of generation 2 are gone or damaged"):
        roll_back(stop(fleet), 2)


def test_a_rollback_takes_the_momentum_with_it(tmp_path: Path) -> None:
    fleet = stop(until(begun(tmp_path, **KINDS["momentum"]), 3))
    ended = fleet.states()[2].momentum
    roll_back(fleet, 2)
    assert (fleet.state.momentum.gen, fleet.state.momentum.ref) == (4, ended.ref)
    assert fleet.store.head(MAIN).files[records.MOMENTUM] == ended.ref
    work_on(fleet)


def test_a_rollback_makes_the_whole_global_where_only_the_update_was_published(
    tmp_path: Path,
) -> None:
    fleet = begun(tmp_path, downlink="update")
    fleet.until_generation(3)
    assert stop(fleet).state.full_gen == 2
    assert fleet.state.global_weights.sha256 not in fleet.store.blobs
    roll_back(fleet, 3)
    now = fleet.state
    assert (now.gen, now.full_gen, now.update) == (4, 4, None)
    assert records.UPDATE not in fleet.store.head(MAIN).files
    elements = read_weights(fleet.store.fetch(now.global_weights, tmp_path / "made"))
    assert sum(elements.values()) == Fraction(3)


def test_snapshots_of_later_generations_go(tmp_path: Path) -> None:
    fleet = stop(until(begun(tmp_path, snapshot_every=1), 4))
    roll_back(fleet, 2)
    held = [p for p in fleet.store.head(MAIN).files if p.startswith("snap/")]
    assert held == [records.snapshot_path(1), records.snapshot_path(2)]
    assert audit(fleet).violations == []


def test_a_compaction_at_any_moment_of_a_rollback_leaves_a_sound_run(tmp_path: Path) -> None:
    """It deletes what only old versions name, and the target's weights are among it."""
    outcomes = set[str]()
    for moment in itertools.count():
        fleet = stop(until(begun(tmp_path / str(moment)), 3))
        task = rolling_back(fleet.store, tmp_path / "c", 2, fleet.said.append, lambda a, b, c: None)
        for _ in itertools.islice(task, moment):
            pass
        if fleet.state.restored_from is not None:
            break
        for _ in compacting(fleet.store, fleet.said.append):
            pass
        try:
            for _ in task:
                pass
            outcomes.add("restored")
            assert fleet.state.restored_from == 2
        except UserError as error:
            outcomes.add(str(error).partition(" or damaged")[0])
        assert audit(fleet).violations == []
    assert outcomes == {"restored", "the weights of generation 2 are gone"}


# --- rollback of a run whose state is damaged ----------------------------------------------------


def test_a_head_that_cannot_be_read_goes_back_to_the_newest_that_can(fleet: FakeFleet) -> None:
    before = stop(fleet).state
    spoil_state(fleet)
    spoil_state(fleet)
    roll_back(fleet, None)
    now = fleet.state
    assert (now.gen, now.restored_from) == (5, 4)
    assert now.global_weights == before.global_weights
    assert now.epoch > before.epoch + 2  # each of the two may have been a claim
    assert (now.ema.ref, now.roster) == (before.ema.ref, before.roster)
    found = audit(fleet)
    assert {v.split()[0] for v in found.violations} == {"files"}


def test_a_damaged_first_version_of_a_generation_is_restored_from_its_record(
    fleet: FakeFleet,
) -> None:
    fleet.until_generation(5)
    newest = stop(fleet).state
    head = fleet.store.head(MAIN)
    fleet.store.blobs[head.files[records.STATE].sha256] = b"{"
    roll_back(fleet, None)
    now = fleet.state
    assert (now.gen, now.restored_from) == (6, 5)
    assert now.global_weights == newest.global_weights
    assert (now.ema.gen, now.ema.count) == (5, 4)  # 5 itself is still to be folded in
    assert now.roster == newest.roster


def test_the_numbers_exceed_those_of_what_nobody_can_read(fleet: FakeFleet) -> None:
    """State and record of the newest generation are both nonsense; its record's name is not."""
    stop(fleet)
    record = records.round_path(5)
    fleet.store.publish(MAIN, {records.STATE: b"{", record: b"{"}, expect=fleet.store.head(MAIN))
    roll_back(fleet, None)
    assert (fleet.state.gen, fleet.state.restored_from) == (6, 4)


def test_a_squashed_and_damaged_run_goes_on_from_its_round_records(fleet: FakeFleet) -> None:
    stop(fleet)
    spoil_state(fleet)
    fleet.store.versions[MAIN] = fleet.store.versions[MAIN][-1:]
    roll_back(fleet, None)
    assert (fleet.state.gen, fleet.state.restored_from) == (5, 4)
    assert fleet.state.compacted_gen == 4
    fleet.add_merger("m2")
    fleet.add_worker(0, "w0b")
    assert fleet.until_generation(7)


def test_a_run_of_which_nothing_can_be_read_says_so(fleet: FakeFleet) -> None:
    stop(fleet)
    gone = {p: None for p in fleet.store.head(MAIN).files if p.startswith(records.ROUNDS)}
    fleet.store.publish(MAIN, {**gone, records.STATE: b"{"}, expect=fleet.store.head(MAIN))
    fleet.store.versions[MAIN] = fleet.store.versions[MAIN][-1:]
    with pytest.raises(UserError, match="restore it from a copy"):
        roll_back(fleet, None)
