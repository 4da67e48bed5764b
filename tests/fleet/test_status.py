"""Status and the choice of a worker number, from pushed logs alone."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from diffurefill.config import UserError
from diffurefill.fleet import start
from diffurefill.fleet.log import MAX_LINES, WorkerLog, read_log
from diffurefill.fleet.run import Fenced
from diffurefill.fleet.start import free_number, join_freely
from diffurefill.fleet.status import (
    GenerationProbes,
    probes_by_generation,
    status_tables,
    worker_statuses,
)
from diffurefill.store.base import NotFound
from tests.fleet.fakes import FakeFleet, MemoryStore


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    fleet.until_generation(3)
    return fleet


def test_the_tables_show_workers_and_generations(fleet: FakeFleet) -> None:
    console = Console(record=True, width=140)
    for table in status_tables(fleet.store):
        console.print(table)
    shown = console.export_text()
    assert "generation 3" in shown
    assert f"{fleet.state.tokens:,} tokens" in shown
    assert "held-out CE by generation" in shown


def test_generations_show_what_the_workers_measured_around_each_merge(fleet: FakeFleet) -> None:
    found = probes_by_generation(fleet.store)
    assert found[0] == GenerationProbes(held_out_ce=7.0, drift=0.25, merge_gain=None)
    assert found[2] == GenerationProbes(held_out_ce=5.0, drift=0.25, merge_gain=-0.5)
    assert list(found) == sorted(found)


def test_a_log_keeps_earlier_incarnations_and_a_bounded_history(fleet: FakeFleet) -> None:
    before = read_log(fleet.store, 0)
    fleet.kill("w0")
    fleet.add_worker(0, "heir")
    after = read_log(fleet.store, 0)
    assert after[: len(before)] == before
    assert after[-1]["phase"] == "register"
    log = WorkerLog(0, "x", lambda line: None)
    for i in range(3 * MAX_LINES):
        log.note("train", {"i": i})
    lines = log.content().decode().splitlines()
    assert len(lines) == MAX_LINES
    assert json.loads(lines[-1])["i"] == 3 * MAX_LINES - 1


def test_a_log_says_what_an_interval_was_like(fleet: FakeFleet) -> None:
    push = next(r for r in read_log(fleet.store, 0) if r["phase"] == "push")
    wanted = {"time", "incarnation", "gen", "seq", "tokens", "loss_mean", "delta_norm", "drift"}
    assert wanted <= push.keys()
    assert {"tokens_per_second", "wall_tokens_per_second"} <= push.keys()


def test_a_store_without_a_run_says_so() -> None:
    with pytest.raises(NotFound, match="no run"):
        status_tables(MemoryStore())


def test_a_new_worker_takes_an_unused_number(fleet: FakeFleet) -> None:
    assert free_number(fleet.run_for("new")) == 2


def test_a_number_taken_at_the_same_moment_is_left_to_the_other(fleet: FakeFleet) -> None:
    tried = []

    def join(number: int) -> int:
        tried.append(number)
        if len(tried) == 1:  # somebody registers between the choice and our registration
            fleet.add_worker(number)
            raise Fenced("taken")
        return number

    assert join_freely(fleet.run_for("new"), join) == 3
    assert tried == [2, 3]


def test_when_all_numbers_are_used_the_longest_silent_one_is_taken(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fleet.run_for("new")
    for number in range(2, run.config.data.num_slots):
        fleet.add_worker(number)
    with pytest.raises(UserError, match="--worker"):
        free_number(run)
    newest = max(w.last["time"] for w in worker_statuses(fleet.store, 0.0))
    later = newest + run.config.fleet.live_seconds + 60
    monkeypatch.setattr(start.time, "time", lambda: later)
    oldest = min(worker_statuses(fleet.store, later), key=lambda w: -w.age_seconds).worker
    assert free_number(run) == oldest
