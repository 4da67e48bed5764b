"""Rollback and compaction as commands, beside a fleet at work and on stores that are busy."""

import random
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.fleet import manage, records, rollback
from diffurefill.fleet.manage import compacting
from diffurefill.fleet.records import State
from diffurefill.fleet.rollback import rolling_back
from diffurefill.store.base import MAIN, Busy, Denied, dump_json
from diffurefill.store.folder import FolderStore
from tests.fleet.damage import audit
from tests.fleet.fakes import FLEET, FakeFleet, MemoryStore
from tests.fleet.runs import begun, until


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return until(begun(tmp_path), 4)


def stop(fleet: FakeFleet) -> FakeFleet:
    fleet.actors.clear()
    return fleet


def compact(fleet: FakeFleet) -> None:
    fleet.add("person", compacting(fleet.store, fleet.said.append))
    assert fleet.run_until(lambda: "person" not in fleet.actors)


# --- compaction ----------------------------------------------------------------------------------


def test_compaction_frees_old_globals_and_the_run_goes_on(fleet: FakeFleet) -> None:
    old, before = fleet.states()[2], fleet.state
    compact(fleet)
    assert old.global_weights.sha256 not in fleet.store.blobs
    assert fleet.state.compacted_gen >= before.gen
    assert fleet.until_generation(before.gen + 3)
    assert audit(fleet).violations == []


def test_compaction_fences_a_live_merger_and_gives_its_term_up(fleet: FakeFleet) -> None:
    epoch, now = fleet.state.epoch, fleet.clock.now
    compact(fleet)
    assert fleet.run_until(lambda: fleet.state.epoch >= epoch + 2)
    assert fleet.clock.now - now < FLEET.lease_seconds
    assert any("took over" in line for line in fleet.said)


def test_a_merger_that_takes_over_meanwhile_is_told(fleet: FakeFleet) -> None:
    epoch = stop(fleet).state.epoch

    def interrupted() -> None:
        for _ in compacting(fleet.store, fleet.said.append):
            if fleet.state.epoch == epoch + 1:
                fleet.add_merger("m2")
                fleet.run_until(lambda: fleet.state.epoch > epoch + 1)

    with pytest.raises(UserError, match="took the run over"):
        interrupted()


@pytest.mark.parametrize("error", [Denied("the disk is full"), KeyboardInterrupt()])
def test_a_compaction_that_ends_early_gives_its_term_up(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(stop(fleet).store, "compact", fail)
    with pytest.raises(type(error)):
        list(compacting(fleet.store, fleet.said.append))
    assert (fleet.state.merger_id, fleet.state.compacted_gen) == ("", 4)


def test_a_compaction_interrupted_while_it_waits_gives_its_term_up(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = stop(fleet).state.epoch

    def interrupt(seconds: float) -> None:
        if fleet.state.epoch > epoch:
            raise KeyboardInterrupt

    monkeypatch.setattr(manage.time, "sleep", interrupt)
    monkeypatch.setattr(manage, "open_store", lambda uri: fleet.store)
    with pytest.raises(KeyboardInterrupt):
        manage.compact("memory:", fleet.said.append)
    assert (fleet.state.epoch, fleet.state.merger_id) == (epoch + 1, "")


# --- both ----------------------------------------------------------------------------------------


class Flaky:
    """A hub that is busy every other time, and answers nothing for a while."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self._chance, self.num_busy = store, random.Random(0), 0
        self.uri = store.uri

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._chance.random() < 0.5:
                self.num_busy += 1
                raise Busy("too many requests", 10.0)
            return method(*args, **kwargs)

        return call


def tasks(fleet: FakeFleet, store: Any) -> list[Generator[float, None, State]]:
    apply = fleet.averager.apply_update
    rolling = rolling_back(store, fleet.folder / "cache", 2, fleet.said.append, apply)
    return [rolling, compacting(store, fleet.said.append)]


@pytest.mark.parametrize("which", [0, 1])
def test_a_store_that_does_not_answer_is_waited_for(fleet: FakeFleet, which: int) -> None:
    store = Flaky(stop(fleet).store)
    fleet.add("person", tasks(fleet, store)[which])
    assert fleet.run_until(lambda: "person" not in fleet.actors, seconds=1e5)
    assert store.num_busy > 3
    assert fleet.state.restored_from == 2 or fleet.state.compacted_gen == 4
    assert audit(fleet).violations == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_store_that_may_not_be_written_is_told_first(
    fleet: FakeFleet, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied() -> None:
        raise Denied("read-only")

    monkeypatch.setattr(fleet.store, "check_access", denied)
    head = stop(fleet).store.head(MAIN)
    with pytest.raises(Denied):
        list(tasks(fleet, fleet.store)[which])
    assert fleet.store.head(MAIN) == head


@pytest.mark.parametrize("which", [0, 1])
def test_a_place_without_a_run_says_so(fleet: FakeFleet, which: int) -> None:
    with pytest.raises(UserError, match="no run at"):
        list(tasks(fleet, MemoryStore())[which])


@pytest.mark.parametrize("which", [0, 1])
def test_a_merger_that_always_comes_first_is_reported(
    fleet: FakeFleet, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(fleet)

    def beat() -> None:
        state = replace(fleet.state, beat=fleet.state.beat + 1)
        changes = {records.STATE: dump_json(records.to_json(state))}
        fleet.store.publish(MAIN, changes, expect=fleet.store.head(MAIN))

    attempt = rollback.Publication.attempt

    def overtaken(publication: Any) -> Any:
        beat()
        return attempt(publication)

    monkeypatch.setattr(rollback.Publication, "attempt", overtaken)
    with pytest.raises(UserError, match="published 8 times meanwhile; stop it"):
        list(tasks(fleet, fleet.store)[which])


def test_the_commands_work_on_a_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "run", create=True)
    fleet = FakeFleet(store, tmp_path)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.until_generation(3)
    stop(fleet)
    said: list[str] = []
    state = manage.rollback(str(tmp_path / "run"), 1, said.append)
    assert state == fleet.state
    assert (state.gen, state.restored_from) == (4, 1)
    state = manage.compact(str(tmp_path / "run"), said.append)
    assert state == fleet.state
    assert (state.compacted_gen, state.merger_id) == (4, "")
    assert len(said) == 2
