"""A running fleet that loses its disk, its token, its newest state or every k-th answer.

What is for a person to mend stops processes with a line that says what to do; once it is mended,
new ones go on and nothing is lost. A hub that is away for hours is in test_patience.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.fleet import records
from diffurefill.fleet.simulate.kernel import Process
from diffurefill.fleet.simulate.scenario import World
from diffurefill.fleet.status import status_tables
from diffurefill.store.base import MAIN, Corrupt, Denied, StoreError, dump_json
from diffurefill.store.folder import FolderStore
from tests.fleet.damage import audit
from tests.fleet.fakes import FakeFleet, MemoryStore
from tests.fleet.runs import roll_back
from tests.fleet.simulate.sound import Script, expect_sound, start
from tests.fleet.test_fleet import expect_sound as expect_sound_fakes


def begun(folder: Path, store: Any) -> FakeFleet:
    fleet = FakeFleet(store, folder)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    return fleet


def run_out(fleet: FakeFleet, seconds: float = 2000.0) -> list[Exception]:
    """Until everybody has stopped; what each stopped with."""
    errors: list[Exception] = []
    end = fleet.clock.now + seconds
    while fleet.actors and fleet.clock.now < end:
        try:
            fleet.run_until(lambda: False, seconds=end - fleet.clock.now)
        except (StoreError, UserError) as error:
            errors.append(error)
            [ended] = [n for n, actor in fleet.actors.items() if _is_over(actor)]
            fleet.kill(ended)
    return errors


def _is_over(actor: Iterator[float]) -> bool:
    return getattr(actor, "gi_frame", None) is None


# --- the disk ------------------------------------------------------------------------------------


class Disk:
    """A disk that can be full: then nothing more is made to last on it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        real: Callable[[int], None] = os.fsync

        def fsync(descriptor: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("moment", range(3, 45, 6))
def test_a_full_disk_stops_everybody_with_advice_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    fleet = begun(tmp_path, FolderStore(tmp_path / "run", create=True))
    disk = Disk(monkeypatch)
    fleet.run_until(lambda: False, seconds=moment)
    before, disk.is_full = fleet.state.gen, True
    errors = run_out(fleet)
    assert len(errors) == 3
    assert fleet.actors == {}
    assert all(isinstance(error, Denied) for error in errors)
    assert all("free space there, then start again" in str(error) for error in errors)
    assert before <= fleet.state.gen <= before + 1
    disk.is_full = False
    fleet.add_merger("m2")
    fleet.add_worker(0, "w0b")
    fleet.add_worker(1, "w1b")
    assert fleet.until_generation(before + 3)
    expect_sound_fakes(fleet)


# --- the token and the hub's room ----------------------------------------------------------------


@pytest.mark.parametrize("moment", range(5, 170, 15))
@pytest.mark.parametrize("kind", ["revoked", "full"])
def test_a_revoked_token_or_a_full_quota_stops_everybody_and_nothing_is_lost(
    tmp_path: Path, kind: str, moment: int
) -> None:
    writes = ("publish", "stage", "compact")
    outage = [float(moment), float("inf")]

    def rule(process: Process, op: str, lane: str, n: int) -> str | None:
        befalls = kind == "revoked" or op in writes
        return kind if befalls and outage[0] <= process.kernel.now < outage[1] else None

    world = start(World(7, tmp_path, plan=Script(rule)))
    world.kernel.run(float(moment))
    before = world.gen
    world.kernel.run(moment + 1200.0)
    assert world.gen == before
    assert [p.ending for p in world.kernel.processes] == [f"Denied: 403: {kind}"] * 3
    outage[1] = world.kernel.now
    start(world)
    assert world.reaches(before + 3, seconds=1500)
    expect_sound(world, tmp_path / "audit")


# --- a state that cannot be read -----------------------------------------------------------------


NONSENSE = {
    "no JSON": b'{"gen": 3, ',
    "a list": b"[]",
    "empty": b"",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_state_that_cannot_be_read_stops_everybody_until_a_rollback(
    tmp_path: Path, kind: str
) -> None:
    fleet = begun(tmp_path, MemoryStore())
    assert fleet.until_generation(3)
    head = fleet.store.head(MAIN)
    spoilt = fleet.store.publish(MAIN, {records.STATE: NONSENSE[kind]}, expect=head)
    errors = run_out(fleet)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, Corrupt)
        assert f"state.json of version {spoilt.id} cannot be read" in str(error)
        assert "`diffurefill rollback memory:` goes on from the newest generation" in str(error)
    with pytest.raises(Corrupt, match="diffurefill rollback"):
        status_tables(fleet.store)
    assert fleet.store.head(MAIN) == spoilt, "nobody writes over what cannot be read"
    roll_back(fleet, None)
    assert fleet.state.restored_from == 3
    fleet.add_merger("m2")
    fleet.add_worker(0, "w0b")
    fleet.add_worker(1, "w1b")
    assert fleet.until_generation(7)
    told = f"files violated: main@{spoilt.id}: state.json is not"
    assert [v[: len(told)] for v in audit(fleet).violations] == [told]


def test_a_state_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    fleet = begun(tmp_path, MemoryStore())
    assert fleet.until_generation(2)
    newer = {**records.to_json(fleet.state), "sparkle": 1}
    spoilt = fleet.store.publish(
        MAIN, {records.STATE: dump_json(newer)}, expect=fleet.store.head(MAIN)
    )
    errors = run_out(fleet)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, UserError)
        assert "written by another version of diffurefill (it has the field 'sparkle'): use" in str(
            error
        )
    with pytest.raises(UserError, match="another version"):
        roll_back(fleet, None)
    assert fleet.store.head(MAIN) == spoilt


# --- answers that are lost -----------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost_answer", "lost_request", "doubled"])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_every_kth_publish_without_an_answer_loses_and_doubles_nothing(
    tmp_path: Path, fault: str, k: int
) -> None:
    """Counted over the whole fleet. A request that never arrives every time would be an outage."""
    if fault == "lost_request" and k == 1:
        k = 4
    seen = [0]

    def rule(process: Process, op: str, lane: str, n: int) -> str | None:
        if op != "publish":
            return None
        seen[0] += 1
        return fault if seen[0] % k == 0 else None

    script = Script(rule)
    world = start(World(8, tmp_path, plan=script), num_workers=3)
    assert world.reaches(5, seconds=2500)
    assert script.told[fault] >= 5
    assert all(p.alive for p in world.kernel.processes)
    assert world.ledger.state["epoch"] == 1
    expect_sound(world, tmp_path / "audit")
