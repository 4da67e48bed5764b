"""Status and the choice of a worker number, from pushed logs alone."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diffurefill.config import UserError
from diffurefill.fleet import records, start, status
from diffurefill.fleet.lane import Taken
from diffurefill.fleet.log import MAX_LINES, WorkerLog, read_log
from diffurefill.fleet.records import Average, Decided, Rejected, Saved
from diffurefill.fleet.start import free_number, work_freely
from diffurefill.fleet.status import (
    GenerationProbes,
    age_text,
    probes_by_generation,
    read_logs,
    status_tables,
    worker_statuses,
)
from diffurefill.store.base import MAIN, NoRun, Store, dump_json
from tests.fleet.fakes import FakeFleet, MemoryStore


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    fleet.wall_clock = lambda: 1e9 + fleet.clock.now
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    fleet.until_generation(3)
    return fleet


def shown(fleet: FakeFleet, width: int = 100, **changes: object) -> str:
    """`diffurefill status` of the newest state with `changes`."""
    state = replace(fleet.state, **changes)
    fleet.store.publish(
        MAIN, {records.STATE: dump_json(records.to_json(state))}, expect=fleet.store.head(MAIN)
    )
    console = Console(record=True, width=width, file=io.StringIO())
    for table in status_tables(fleet.store):
        console.print(table)
    return console.export_text()


def test_the_tables_show_the_run_its_workers_and_generations(fleet: FakeFleet) -> None:
    text = shown(fleet)
    assert "3; step 12, 240 tokens" in text
    assert f"1 of merger {fleet.state.merger_id[:8]}, beat" in text
    assert "workers 0, 1" in text
    assert "EMA of 2 (up to 2)" in text
    assert "held-out CE by generation" in text
    for absent in ("stands still", "guard CE", "snapshots", "refused", "compacted", "SWA"):
        assert absent not in text


def test_an_alert_comes_first(fleet: FakeFleet) -> None:
    text = shown(fleet, alert="generation 4 is held back: do this and that")
    assert "the merger stands still" in text.splitlines()[0]
    assert "generation 4 is held back: do this and that" in text.splitlines()[1]


def test_a_term_that_was_given_up_is_said_to_be_free(fleet: FakeFleet) -> None:
    assert "1 is over: the next `diffurefill merger` begins at once" in shown(fleet, merger_id="")


def test_a_run_that_no_merger_has_seen_has_no_epoch_that_could_be_over(fleet: FakeFleet) -> None:
    text = shown(fleet, epoch=0, merger_id="")
    assert "none yet: `diffurefill merger` begins the first" in text
    assert "is over" not in text


def test_80_columns_hold_a_worker_whose_figures_are_long(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {
        "time": -900_000.0, "incarnation": "0123456789", "phase": "nonfinite", "gen": 123,
        "step": 12345, "loss": 10.123, "tokens_per_second": 12345.0, "mfu_6nd": 0.412,
    }  # fmt: skip
    monkeypatch.setattr(status, "read_log", lambda *_: [long])
    monkeypatch.setattr(status.time, "time", lambda: 0.0)
    text = shown(fleet, width=80)
    row = "0 │ 01234567 │ nonfinite │ 123 │ 12345 │ 10.123 │ 12,345 │ 41.2% │ 10 d"
    assert row in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3.0, "-3 s"), (119.0, "119 s"), (120.0, "2 min"), (7200.0, "2 h"), (172_800.0, "2 d")],
)
def test_an_age_is_told_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_everything_else_that_a_state_tells_is_shown(fleet: FakeFleet) -> None:
    ref = fleet.state.global_weights
    text = shown(
        fleet,
        restored_from=1,
        live=(),
        swa=Average(ref, 2, 3),
        snapshots=(Saved(1, ref), Saved(3, ref)),
        guard_ce=6.54321,
        compacted_gen=2,
    )
    assert "3, restores 1; step" in text
    assert "nobody seen yet" in text
    assert "SWA of 2" in text
    assert "generations 1, 3" in text
    assert "6.543 nats" in text
    assert "before 2 may be gone" in text


def test_refusals_are_shown_with_their_reasons_and_each_once(fleet: FakeFleet) -> None:
    new = Rejected(worker=1, incarnation="b", seq=7, base_gen=3, reason="norm")
    roster = {
        "0": Decided(incarnation="a", seq=3),
        "1": Decided(incarnation="b", seq=7, reason="norm"),
        "2": Decided(incarnation="c", seq=5, reason="cosine"),
    }
    text = shown(fleet, rejected=(new,), roster=roster)
    assert "worker 1, contribution 7 to generation 3: norm" in text
    assert "worker 2, contribution 5, its last one: cosine" in text
    assert text.count("contribution") == 2


def test_generations_show_what_the_workers_measured_around_each_merge(fleet: FakeFleet) -> None:
    found = probes_by_generation(read_logs(fleet.store))
    assert found[0] == GenerationProbes(held_out_ce=7.0, drift=0.25, merge_gain=None)
    assert found[2] == GenerationProbes(held_out_ce=5.0, drift=0.25, merge_gain=-0.5)
    assert list(found) == sorted(found)


def test_a_log_keeps_earlier_incarnations_and_a_bounded_history(fleet: FakeFleet) -> None:
    before = read_log(fleet.store, 0)
    fleet.kill("w0")
    lines = len(before)
    fleet.add_worker(0, "heir")
    fleet.run_until(lambda: len(read_log(fleet.store, 0)) > lines)
    after = read_log(fleet.store, 0)
    assert after[: len(before)] == before
    assert after[-1]["phase"] == "register"
    log = WorkerLog(0, "x", lambda line: None, lambda: 1e9)
    for i in range(3 * MAX_LINES):
        log.note("train", {"i": i})
    lines = log.content().decode().splitlines()
    assert len(lines) == MAX_LINES
    assert json.loads(lines[-1])["i"] == 3 * MAX_LINES - 1
    log.note("push", {"drift": float("nan"), "ce_by_t": {"0-1": float("inf")}, "shape": (1, 2)})
    last = json.loads(log.content().decode().splitlines()[-1], parse_constant=pytest.fail)
    assert (last["drift"], last["ce_by_t"], last["shape"]) == (None, {"0-1": None}, [1, 2])


def test_a_log_says_what_an_interval_was_like(fleet: FakeFleet) -> None:
    push = next(r for r in read_log(fleet.store, 0) if r["phase"] == "push")
    wanted = {"time", "incarnation", "gen", "seq", "tokens", "loss_mean", "delta_norm", "drift"}
    wanted |= {"machine", "store_errors", "tokens_per_second", "wall_tokens_per_second"}
    assert wanted <= push.keys()
    pushes = [r for r in read_log(fleet.store, 0) if r["phase"] == "push"]
    assert len(pushes) > 1
    for push in pushes:  # by the wall the download counts too, and the wait for others
        assert 0.0 < push["wall_tokens_per_second"] < push["tokens_per_second"]


def test_a_figure_that_is_no_number_is_left_out_of_a_mean(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ces = [(1, 2.0), (1, None), (2, None)]
    lines = [{"gen": gen, "held_out_ce": ce} for gen, ce in ces]
    monkeypatch.setattr(status, "read_log", lambda *_: lines)
    found = probes_by_generation(read_logs(fleet.store))
    assert {gen: probes.held_out_ce for gen, probes in found.items()} == {1: 2.0}


def test_a_lane_without_a_log_is_passed_over(fleet: FakeFleet) -> None:
    fleet.store.publish("w-07", {"reg_w07.json": b"{}"}, expect=None)
    found = worker_statuses(read_logs(fleet.store), 0.0)
    assert [w.worker for w in found] == [0, 1]


def test_every_log_is_read_once(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(store: Store, worker: int) -> list[dict[str, Any]]:
        asked.append(worker)
        return read_log(store, worker)

    monkeypatch.setattr(status, "read_log", counted)
    status_tables(fleet.store)
    assert asked
    assert sorted(asked) == sorted(set(asked))


def test_a_store_without_a_run_says_so() -> None:
    with pytest.raises(NoRun, match="no run at memory:: make one with `diffurefill init memory:`"):
        status_tables(MemoryStore())


def test_a_new_worker_takes_an_unused_number(fleet: FakeFleet) -> None:
    assert free_number(fleet.run_for("new")) == 2


def test_a_number_taken_at_the_same_moment_is_left_to_the_other(fleet: FakeFleet) -> None:
    tried = []

    def work(number: int) -> None:
        tried.append(number)
        if len(tried) == 1:  # somebody registers between the choice and our registration
            fleet.add_worker(number)
            fleet.run_until(lambda: f"w-{number:02d}" in fleet.store.lanes())
            raise Taken("taken")

    work_freely(fleet.run_for("new"), work)
    assert tried == [2, 3]


def test_when_all_numbers_are_used_the_longest_silent_one_is_taken(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fleet.run_for("new")
    for number in range(2, run.config.data.num_slots):
        fleet.add_worker(number)
    fleet.run_until(lambda: len(fleet.store.lanes()) == run.config.data.num_slots + 1)
    monkeypatch.setattr(start.time, "time", fleet.wall_clock)
    with pytest.raises(UserError, match="--worker"):
        free_number(run)
    newest = max(w.last["time"] for w in worker_statuses(read_logs(fleet.store), 0.0))
    later = newest + run.config.fleet.live_seconds + 60
    monkeypatch.setattr(start.time, "time", lambda: later)
    oldest = min(
        worker_statuses(read_logs(fleet.store), later), key=lambda w: -w.age_seconds
    ).worker
    assert free_number(run) == oldest
