"""The audit passes sound runs of every kind; see test_audit_damage.py for the others."""

from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.fleet import audit_history, records
from diffurefill.fleet.audit import INVARIANTS, audit_run
from diffurefill.fleet.manage import compacting
from diffurefill.store.base import MAIN, Busy
from tests.fleet.damage import (
    audit,
    damage,
    forge,
    violated,
)
from tests.fleet.fakes import FakeAverager, FakeFleet, MemoryStore
from tests.fleet.runs import KINDS, begun, recorded, roll_back, until

GENERATIONS = 4


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return until(begun(tmp_path), GENERATIONS)


def test_a_sound_run_passes_and_says_what_was_checked(fleet: FakeFleet) -> None:
    found = audit(fleet)
    assert found.verdict == "ok"
    assert found.generations == GENERATIONS
    unseen = {"I13"}
    assert all(found.checks[name] >= GENERATIONS for name in INVARIANTS.keys() - unseen)
    assert not found.unchecked
    assert list((fleet.folder / "audit").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_sound_runs_pass(tmp_path: Path, kind: str) -> None:
    fleet = begun(tmp_path, **KINDS[kind])
    fleet.ticks["w1"] = 3.0
    assert audit(until(fleet, 7)).violations == []


@pytest.mark.parametrize("kind", KINDS)
def test_sound_runs_with_rollbacks_pass(tmp_path: Path, kind: str) -> None:
    fleet = until(begun(tmp_path, **KINDS[kind]), 5)
    roll_back(fleet, 4)
    until(fleet, 8)
    roll_back(fleet, fleet.state.gen)
    roll_back(fleet, 4)
    found = audit(until(fleet, fleet.state.gen + 4))
    assert found.violations == []
    restored = [s.restored_from for s in recorded(fleet) if s.restored_from is not None]
    assert restored[0] == restored[2] == 4


def test_everything_at_once_passes(tmp_path: Path) -> None:
    every = {name: value for kind in KINDS.values() for name, value in kind.items()}
    fleet = until(begun(tmp_path, **every), 6)
    roll_back(fleet, fleet.state.gen)
    found = audit(until(fleet, 12))
    assert found.violations == []
    assert found.unchecked["I9"] > 0


def test_contributions_merged_late_pass(tmp_path: Path) -> None:
    fleet = begun(tmp_path, **KINDS["late"])
    fleet.ticks["w1"] = 3.0
    until(fleet, 10)
    assert any(c.base_gen < s.gen - 1 for s in fleet.states() for c in s.accepted)
    assert audit(fleet).violations == []


def test_the_newest_generation_may_have_its_update_only(tmp_path: Path) -> None:
    fleet = begun(tmp_path, downlink="update")
    fleet.until_generation(3)
    assert fleet.state.full_gen == 2
    found = audit(fleet)
    assert found.violations == []
    assert not found.unchecked


def test_a_compacted_run_still_has_every_rule_on_records(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path, compact_every=3), 8)
    found = audit(fleet)
    assert found.violations == []
    assert found.generations == 8
    assert found.unchecked["I9"] >= 5
    assert found.checks["I3"] == sum(len(s.accepted) for s in recorded(fleet))


def test_after_a_compaction_what_is_still_there_is_checked(tmp_path: Path) -> None:
    """Also where only a generation's update is on its record: its whole file followed it."""
    kept = {"snapshot_every": 2, "snapshot_keep": 8}
    fleet = until(begun(tmp_path, downlink="update", compact_every=3, **kept), 8)
    told = recorded(fleet)
    gone = [s.gen for s in told if s.global_weights.sha256 not in fleet.store.blobs]
    assert 0 < len(gone) < len(told) - 2
    found = audit(fleet)
    assert found.violations == []
    assert found.unchecked["I8"] == len(gone)


def test_a_version_that_cannot_be_read_hides_nothing_but_itself(fleet: FakeFleet) -> None:
    """The averages that it told of are told by what followed."""
    for version in list(fleet.store.history(MAIN))[1:-1]:
        ref = version.ref(records.STATE)
        content = fleet.store.blobs[ref.sha256]
        fleet.store.blobs[ref.sha256] = b"{"
        (violation,) = audit(fleet).violations
        assert violation.startswith("files violated")
        fleet.store.blobs[ref.sha256] = content


def test_a_damaged_upload_that_was_refused_is_no_fault_of_the_run(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    learner = fleet.add_worker(0)
    fleet.run_until(lambda: fleet.has_pushed(0))
    damage(fleet, fleet.store.head("w-00").files[records.worker_paths(0).payload])
    learner.extra = {"again": 1}  # the second upload must not mend the first
    fleet.add_merger()
    until(fleet, 3)
    assert [r.reason for s in recorded(fleet) for r in s.rejected] == ["corrupt"]
    found = audit(fleet)
    assert found.violations == []
    looked = sum(len(state.looked) for state in fleet.states())
    assert found.checks["I15"] == 1 + looked


@pytest.mark.parametrize("gens", [5, 7])
def test_a_squashed_history_passes_from_where_it_begins(tmp_path: Path, gens: int) -> None:
    """A hub's compaction drops the older versions themselves."""
    fleet = until(begun(tmp_path), gens)
    fleet.add("person", compacting(fleet.store, fleet.said.append))
    fleet.run_until(lambda: fleet.state.compacted_gen > 0)
    fleet.run_until(lambda: not fleet.state.merger_id)
    first = [v for v in fleet.store.versions[MAIN] if v.files[records.STATE]]
    place = len(first) - 2  # what the command published before it gave its term up
    fleet.store.versions[MAIN] = first[place:]
    until(fleet, gens + 3)
    found = audit(fleet)
    assert found.violations == []
    assert found.checks["I3"] == 2 * fleet.state.gen
    forge(fleet, 2, lambda s: replace(s, step=s.step + 1))
    assert violated(fleet) == {"I12"}


def test_a_busy_store_is_waited_for(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(audit_history.time, "sleep", waited.append)
    fetch, trouble = fleet.store.fetch, iter([True, True, False, True])

    def sometimes(ref: records.Ref, dest: Path) -> Path:
        if next(trouble, False):
            raise Busy("too many requests", 30.0)
        return fetch(ref, dest)

    monkeypatch.setattr(fleet.store, "fetch", sometimes)
    assert audit(fleet).verdict == "ok"
    assert waited == [30.0, 30.0, 30.0]


def test_a_run_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run at"):
        audit_run(MemoryStore(), FakeAverager(), tmp_path, lambda line: None)
