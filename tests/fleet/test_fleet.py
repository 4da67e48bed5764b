"""Worker and merger together, in virtual time: what is merged, what is dropped, who is stopped."""

import itertools
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.fleet import records
from diffurefill.fleet.audit import audit_run
from diffurefill.fleet.run import Fenced
from diffurefill.fleet.worker import Worker
from diffurefill.store.base import MAIN
from tests.fleet.fakes import (
    FLEET,
    FakeAverager,
    FakeFleet,
    FakeLearner,
    FrozenHead,
    MemoryStore,
    read_weights,
)


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(MemoryStore(), tmp_path)


def expect_sound(fleet: FakeFleet) -> None:
    """Every accepted contribution is in the weights exactly once; the audit agrees."""
    accepted = fleet.accepted()
    assert Counter(c.identity for c in accepted).most_common(1)[0][1] == 1
    expected: dict[str, Fraction] = {}
    by_gen: dict[int, list[records.Contribution]] = {}
    for c in accepted:
        by_gen.setdefault(c.base_gen, []).append(c)
    for together in by_gen.values():
        for c in together:
            element = f"w{c.worker}:{c.cursor_end['rows']}"
            share = Fraction(c.tokens, sum(x.tokens for x in together))
            expected[element] = expected.get(element, Fraction(0)) + share
    assert fleet.global_weights() == expected
    audit = audit_run(fleet.store, FakeAverager(), fleet.folder / "audit", lambda line: None)
    assert audit.verdict == "ok"
    assert audit.generations == fleet.state.gen


def test_two_workers_start_every_interval_from_the_same_bytes(fleet: FakeFleet) -> None:
    fleet.add_merger()
    learners = [fleet.add_worker(0), fleet.add_worker(1)]
    assert fleet.until_generation(5)
    fleet.run_until(lambda: all(len(x.adopted) == 6 for x in learners))
    assert learners[0].adopted == learners[1].adopted
    assert fleet.state.step == 5 * FLEET.local_steps
    assert fleet.state.tokens == 5 * 2 * FLEET.local_steps * 10
    expect_sound(fleet)


def test_one_worker_alone_goes_on_after_the_other_is_dead(fleet: FakeFleet) -> None:
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    fleet.until_generation(1)
    fleet.kill("w1")
    assert fleet.until_generation(4)
    assert [c.worker for c in fleet.state.accepted] == [0]
    expect_sound(fleet)


def test_a_merger_restarted_first_merges_what_a_dead_fleet_had_pushed(fleet: FakeFleet) -> None:
    """The report's rule ii: one leftover is enough, no living worker is waited for."""
    fleet.add_worker(0)
    fleet.run_until(lambda: fleet.has_pushed(0))
    fleet.kill("w0")
    fleet.add_merger()
    assert fleet.until_generation(1, seconds=FLEET.grace_seconds + 10)
    assert [c.worker for c in fleet.state.accepted] == [0]
    expect_sound(fleet)


def test_a_restarted_worker_waits_for_its_own_leftover_instead_of_repeating_it(
    fleet: FakeFleet,
) -> None:
    fleet.add_worker(0)
    fleet.run_until(lambda: fleet.has_pushed(0))
    fleet.kill("w0")
    fleet.add_worker(0, name="again")
    fleet.kill("again")
    heir = fleet.add_worker(0, name="third")  # two restarts later it is still there
    fleet.run_until(lambda: False, seconds=60)
    assert heir.adopted == []
    fleet.add_merger()
    assert fleet.until_generation(2)
    assert [c.cursor_end for c in fleet.accepted()] == [{"rows": 4}, {"rows": 8}]
    expect_sound(fleet)


def test_a_newer_global_drops_the_partial_interval(fleet: FakeFleet) -> None:
    fleet.ticks["w1"] = 60.0  # far slower than grace: its contributions never count
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(2)
    slow = fleet.add_worker(1)
    assert fleet.until_generation(3)
    fleet.run_until(lambda: len(slow.adopted) == 2)
    assert any("worker 1: dropped" in line for line in fleet.said)
    assert all(c.worker != 1 for c in fleet.accepted())
    assert slow.rows_at <= FLEET.local_steps  # its rows are read again, none is skipped
    expect_sound(fleet)


def test_work_on_an_old_global_is_rejected_even_when_the_hub_hid_the_new_one(
    fleet: FakeFleet,
) -> None:
    hub = FrozenHead(fleet.store)
    fleet.ticks["w1"] = 30.0
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(2)
    fleet.add_worker(1, store=hub)
    hub.freeze()
    assert fleet.until_generation(1)
    assert fleet.run_until(lambda: fleet.has_pushed(1), seconds=900)
    assert fleet.until_generation(fleet.state.gen + 2)
    assert all(c.worker != 1 for c in fleet.accepted())
    assert any("rejected worker 1, contribution 1: stale_base" in s for s in fleet.said)
    recorded = [r for state in fleet.states() for r in state.rejected]
    assert [(r.worker, r.reason) for r in recorded] == [(1, "stale_base")]
    hub.thaw()
    told = "worker 1: rejected gen 0, seq 1, lost steps 4, reason stale_base"
    assert fleet.run_until(lambda: told in fleet.said, seconds=200)
    expect_sound(fleet)


def test_a_second_process_under_the_same_number_stops_the_first(fleet: FakeFleet) -> None:
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.run_until(lambda: False, seconds=2)
    fleet.add_worker(0, name="twin")
    with pytest.raises(Fenced, match="took over worker 0"):
        fleet.run_until(lambda: False, seconds=100)
    fleet.kill("w0")
    assert fleet.until_generation(3)
    expect_sound(fleet)


def test_weights_that_are_not_finite_are_never_pushed(fleet: FakeFleet) -> None:
    fleet.add_merger()
    learner = fleet.add_worker(0, nan_intervals=2)
    assert fleet.until_generation(1)
    assert learner.num_resets == 2
    expect_sound(fleet)


def test_a_worker_that_keeps_diverging_stops_with_advice(fleet: FakeFleet) -> None:
    fleet.add_worker(0, nan_intervals=99)
    with pytest.raises(UserError, match="lower optim"):
        fleet.run_until(lambda: False, seconds=500)


def test_a_damaged_payload_is_rejected_and_its_worker_learns_of_it(fleet: FakeFleet) -> None:
    fleet.add_worker(0)
    fleet.run_until(lambda: fleet.has_pushed(0))
    payload = fleet.store.head("w-00").files["ckpt_w00.safetensors"]
    fleet.store.blobs[payload.sha256] = b"{}"
    fleet.add_merger()
    fleet.run_until(lambda: bool(fleet.state.rejected), seconds=100)
    assert [(r.worker, r.reason) for r in fleet.state.rejected] == [(0, "corrupt")]
    fleet.run_until(lambda: any("worker 0: rejected" in s for s in fleet.said), seconds=100)
    assert any("reason corrupt" in s for s in fleet.said)
    assert fleet.until_generation(1, seconds=100)
    assert [(r.worker, r.reason) for r in fleet.state.rejected] == [(0, "corrupt")]
    assert [c.seq for c in fleet.state.accepted] == [2]


def test_a_merger_that_died_before_the_ema_leaves_it_to_its_successor(fleet: FakeFleet) -> None:
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.run_until(lambda: fleet.state.gen == 1)
    fleet.kill("merger")  # the generator stands between its two publishes
    assert fleet.state.ema is None
    fleet.add_merger("next")
    assert fleet.until_generation(3)
    fleet.run_until(lambda: fleet.state.ema.gen == 3)
    assert fleet.state.ema.count == 3
    expect_sound(fleet)


def test_a_merger_killed_between_averaging_and_publishing_loses_nothing(fleet: FakeFleet) -> None:
    class Die(BaseException):
        pass

    def die(event: str, state: records.State) -> None:
        if event == "averaged" and state.gen == 2:
            raise Die

    fleet.add_merger(on_event=die)
    fleet.add_worker(0)
    fleet.add_worker(1)
    with pytest.raises(Die):
        fleet.until_generation(5)
    fleet.kill("merger")
    assert fleet.state.gen == 1
    fleet.add_merger("next")
    assert fleet.until_generation(3)
    expect_sound(fleet)


def test_a_worker_without_a_slot_is_refused(fleet: FakeFleet) -> None:
    with pytest.raises(UserError, match="no data slot"):
        fleet.add_worker(999)


def test_a_lane_that_cannot_be_read_never_stops_the_merger(fleet: FakeFleet) -> None:
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    fleet.store.publish("w-05", {"ckpt_w05.json": b"not json", "reg_w05.json": b"{}"}, expect=None)
    assert fleet.until_generation(2, seconds=500)
    assert any("lane w-05 cannot be read" in line for line in fleet.said)


def test_a_worker_of_another_version_stops_with_advice(fleet: FakeFleet) -> None:
    fleet.add_merger()
    fleet.add_worker(0).codec = "from the future"
    with pytest.raises(UserError, match="version of diffurefill"):
        fleet.run_until(lambda: False, seconds=200)
    assert [(r.worker, r.reason) for r in fleet.state.rejected] == [(0, "codec")]


@pytest.mark.parametrize("content", [b'{"worker": 0, "sparkle": 1}', b"{}"])
def test_a_lane_of_another_version_is_not_taken_over(fleet: FakeFleet, content: bytes) -> None:
    fleet.store.publish("w-00", {"reg_w00.json": content}, expect=None)
    fleet.add_worker(0)
    with pytest.raises(UserError, match="registration was written by another version"):
        fleet.run_until(lambda: False, seconds=50)


def test_files_of_another_worker_on_a_lane_count_for_nobody(fleet: FakeFleet) -> None:
    fleet.add_worker(0)
    fleet.run_until(lambda: fleet.has_pushed(0))
    lane = fleet.store.head("w-00").files
    copied = {"ckpt_w01.json": lane["ckpt_w00.json"], "reg_w01.json": lane["reg_w00.json"]}
    fleet.store.publish("w-01", copied, expect=None)
    fleet.add_merger()
    assert fleet.until_generation(1, seconds=300)
    assert len(fleet.accepted()) == 1
    assert any("lane w-01 cannot be read" in line for line in fleet.said)


def test_a_payload_that_is_gone_is_rejected(fleet: FakeFleet) -> None:
    fleet.add_worker(0)
    fleet.run_until(lambda: fleet.has_pushed(0))
    del fleet.store.blobs[fleet.store.head("w-00").files["ckpt_w00.safetensors"].sha256]
    fleet.add_merger()
    assert fleet.until_generation(1, seconds=300)
    assert [(r.worker, r.reason) for r in fleet.state.rejected] == [(0, "corrupt")]


def test_rounds_are_counted_by_what_was_merged(fleet: FakeFleet) -> None:
    fleet.add_merger()
    run = fleet.run_for("w0")
    learner = FakeLearner(0, nan_intervals=1)
    worker = Worker(run, 0, learner, clock=fleet.clock, report=fleet.said.append)
    fleet.add("w0", worker.run(rounds=2))
    fleet.run_until(lambda: "w0" not in fleet.actors, seconds=500)
    assert fleet.said[-1] == "worker 0: 2 contributions merged, done"
    assert len(fleet.accepted()) == 2


def test_the_published_file_is_the_state_s_global(fleet: FakeFleet) -> None:
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.until_generation(2)
    head = fleet.store.head(MAIN)
    assert head.files[records.GLOBAL] == fleet.state.global_weights
    assert read_weights(fleet.store.fetch(head.files[records.GLOBAL], fleet.folder / "x"))


def test_no_rule_reads_a_clock_of_another_machine(fleet: FakeFleet) -> None:
    """Wall clocks jump by an hour, forth and back; only logs show it."""
    jumps = itertools.cycle([0.0, 3600.0, -3600.0])
    fleet.wall_clock = lambda: 1e9 + next(jumps)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    assert fleet.until_generation(4)
    assert [len(s.accepted) for s in fleet.states()[1:]] == [2, 2, 2, 2]
    expect_sound(fleet)
