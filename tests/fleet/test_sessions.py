"""Sessions that end, workers that are late, and the arm that keeps its drift."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from diffurefill.fleet.log import read_log
from tests.fleet.fakes import FLEET, FakeFleet, MemoryStore
from tests.fleet.test_fleet import expect_sound

LONG = replace(FLEET, local_steps=40, min_partial_steps=10)
PUSH_MARGIN = 2 * 30
"""Seconds that a worker without a measured push leaves for it, twice."""


def test_a_session_about_to_end_pushes_what_it_has(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, LONG)
    fleet.add_merger()
    fleet.add_worker(0, session_seconds=PUSH_MARGIN + 30)
    assert fleet.until_generation(1)
    [c] = fleet.accepted()
    assert LONG.min_partial_steps <= c.steps < LONG.local_steps
    assert (c.cursor_end, c.tokens) == ({"rows": c.steps}, 10 * c.steps)
    fleet.run_until(lambda: "w0" not in fleet.actors)
    assert fleet.state.step == c.steps
    heir = fleet.add_worker(0, "heir")
    assert fleet.until_generation(2)
    assert fleet.state.cursor(0) == {"rows": c.steps + LONG.local_steps}
    assert heir.adopted[0][0] == 1
    expect_sound(fleet)


def test_a_session_too_short_to_count_pushes_nothing(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, LONG)
    fleet.add_merger()
    fleet.add_worker(0, session_seconds=PUSH_MARGIN + 8)
    fleet.run_until(lambda: "w0" not in fleet.actors)
    assert not fleet.has_pushed(0)
    assert any("session ends; nothing was pushed: that takes 10 steps" in s for s in fleet.said)


def test_a_session_that_ends_while_it_waits_leaves_its_contribution(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, FLEET)
    fleet.add_worker(0, session_seconds=PUSH_MARGIN + 200)
    fleet.run_until(lambda: "w0" not in fleet.actors)
    assert fleet.has_pushed(0)
    fleet.add_merger()
    assert fleet.until_generation(1)
    expect_sound(fleet)


def test_a_worker_says_once_that_nobody_merges(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, FLEET)
    fleet.add_worker(0, session_seconds=PUSH_MARGIN + 10 * FLEET.lease_seconds)
    fleet.run_until(lambda: "w0" not in fleet.actors)
    assert sum("is it running? `diffurefill merger " in line for line in fleet.said) == 1


def test_a_worker_says_nothing_of_a_merger_that_waits_for_others(tmp_path: Path) -> None:
    patient = replace(FLEET, min_fresh=2, grace_seconds=10 * FLEET.lease_seconds)
    fleet = FakeFleet(MemoryStore(), tmp_path, patient)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    assert fleet.until_generation(1)
    fleet.kill("w1")
    assert fleet.until_generation(2)
    assert not any("is it running?" in line for line in fleet.said)


def test_a_late_contribution_is_merged_with_less_weight_where_the_run_says_so(
    tmp_path: Path,
) -> None:
    late = replace(FLEET, max_staleness=2, staleness_discount=1.0, grace_seconds=5.0)
    fleet = FakeFleet(MemoryStore(), tmp_path, late)
    fleet.ticks["w2"] = 3.0
    fleet.add_merger()
    for number in (0, 1, 2):
        fleet.add_worker(number)
    assert fleet.run_until(lambda: any(c.worker == 2 for c in fleet.accepted()), seconds=3000)
    [stale] = [
        (c, state)
        for state in fleet.states()
        for c in state.accepted
        if c.worker == 2 and c.base_gen < state.gen - 1
    ][:1]
    c, state = stale
    element = f"w2:{c.cursor_end['rows']}"
    before = next(s for s in fleet.states() if s.gen == state.gen - 1)
    behind = before.gen - c.base_gen
    others = sum(x.tokens for x in state.accepted if x is not c)
    own = c.tokens / (1 + behind)
    assert fleet.global_weights()[element] == Fraction(own) / Fraction(own + others)
    assert c.identity not in {r.identity for s in fleet.states() for r in s.rejected}


def test_keep_drift_trains_on_while_it_waits_and_loses_no_row(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, replace(FLEET, adoption="keep_drift"))
    fleet.add_merger()
    learner = fleet.add_worker(0)
    fleet.add_worker(1)
    assert fleet.until_generation(5)
    assert max(learner.aheads) > 0
    rows = [c.cursor_end["rows"] for c in fleet.accepted() if c.worker == 0]
    assert rows == [4, 8, 12, 16, 20]
    expect_sound(fleet)


def test_the_pace_of_a_drifting_worker_is_measured_from_its_first_step(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, replace(FLEET, adoption="keep_drift"))
    fleet.clock.now = 1e6  # the machine has been up for days
    fleet.add_merger()
    learner = fleet.add_worker(0)
    assert fleet.until_generation(5)
    assert max(learner.aheads) > 0
    log = read_log(fleet.store, 0)
    paces = [r["tokens_per_second"] for r in log if "tokens_per_second" in r]
    assert paces
    assert all(1.0 < pace <= 10.0 for pace in paces), paces  # 10 tokens a step of 1 s


def test_a_drift_on_a_refused_contribution_is_dropped(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path, replace(FLEET, adoption="keep_drift"))
    learner = fleet.add_worker(0)
    fleet.run_until(lambda: fleet.has_pushed(0))
    fleet.run_until(lambda: False, seconds=60)  # drifts: no merger decides
    payload = fleet.store.head("w-00").files["ckpt_w00.safetensors"]
    fleet.store.blobs[payload.sha256] = b"{}"
    fleet.add_merger()
    assert fleet.until_generation(1)
    assert learner.aheads == [0, 0]
    expect_sound(fleet)
