"""The rules as pure functions: what counts, and what a publish makes of the state."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import FleetConfig, UserError
from diffurefill.fleet import protocol, records
from diffurefill.fleet.records import (
    Average,
    Contribution,
    Decided,
    Measured,
    Registration,
    Rejected,
    Saved,
    State,
)
from diffurefill.store.base import Ref, dump_json
from tests.fleet.fakes import CODEC

GLOBAL = Ref("g7", 100)
STATE = State(
    run_id="run",
    config_sha="config",
    schema_sha="schema",
    corpus_sha="corpus",
    global_weights=GLOBAL,
    gen=7,
    parent_gen=6,
    epoch=2,
    step=70,
    tokens=700,
    cursors={"1": {"rows": 40}},
)
GOOD = Contribution(
    run_id="run",
    worker=1,
    incarnation="a",
    seq=3,
    base_gen=7,
    base_sha256="g7",
    config_sha="config",
    schema_sha="schema",
    codec=CODEC,
    payload=Ref("p", 10),
    steps=10,
    tokens=100,
    cursor_start={"rows": 40},
    cursor_end={"rows": 50},
    moment_steps=1000,
    delta_norm=1.0,
    loss_mean=2.0,
)
REGISTERED = Registration(worker=1, incarnation="a")


def judge(c: Contribution = GOOD, state: State = STATE, reg: Registration = REGISTERED) -> str:
    return protocol.judge(c, state, reg, [CODEC], 0)


def test_a_contribution_to_the_current_global_is_eligible() -> None:
    assert judge() == "eligible"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "other"}, "run"),
        ({"config_sha": "other"}, "config"),
        ({"schema_sha": "other"}, "schema"),
        ({"codec": "other"}, "codec"),
        ({"base_gen": 6}, "stale_base"),
        ({"base_gen": 8}, "stale_base"),
        ({"base_sha256": "the same tag, other weights"}, "stale_base"),
        ({"incarnation": "a zombie"}, "incarnation"),
        ({"cursor_start": {"rows": 30}}, "slot_cursor"),
        ({"cursor_start": None}, "slot_cursor"),
        ({"steps": 0}, "no_steps"),
        ({"tokens": 0}, "no_steps"),
    ],
)
def test_a_contribution_is_rejected_with_its_reason(change: dict, reason: str) -> None:
    assert judge(replace(GOOD, **change)) == reason


def test_a_republished_generation_does_not_accept_work_done_on_the_old_weights() -> None:
    """The report's rule iii: the number may look right, the bytes decide."""
    republished = replace(STATE, global_weights=Ref("restored", 100))
    assert judge(state=republished) == "stale_base"


def test_an_inherited_contribution_of_a_dead_incarnation_still_counts() -> None:
    assert judge(reg=Registration(worker=1, incarnation="b", inherited="a")) == "eligible"
    assert judge(reg=Registration(worker=1, incarnation="b")) == "incarnation"


def test_what_was_decided_is_not_judged_again() -> None:
    decided = replace(STATE, roster={"1": Decided(incarnation="a", seq=3)})
    assert judge(state=decided) == "decided"
    assert judge(replace(GOOD, seq=4), decided) == "eligible"
    assert judge(state=replace(STATE, roster={"1": Decided(incarnation="b", seq=9)})) == "eligible"


def advance(state: State = STATE, **changes: Any) -> State:
    facts: dict[str, Any] = {
        "accepted": [GOOD],
        "measured": [Measured(norm=1.0, cosine=1.0)],
        "rejected": [],
        "global_weights": Ref("g8", 100),
        "update": None,
        "momentum": None,
        "guard_ce": None,
        "looked": {},
        "live": [1],
        "max_staleness": 0,
    }
    return protocol.advanced(state, **{**facts, **changes})


def test_a_generation_moves_step_tokens_and_only_the_accepted_slots() -> None:
    other = replace(GOOD, worker=2, steps=8, tokens=80, cursor_end={"rows": 8})
    late = Rejected(worker=3, incarnation="c", seq=1, base_gen=6, reason="stale_base")
    after = advance(accepted=[GOOD, other], rejected=[late])
    assert (after.gen, after.parent_gen, after.step, after.tokens) == (8, 7, 80, 880)
    assert after.cursors == {"1": {"rows": 50}, "2": {"rows": 8}}
    assert set(after.roster) == {"1", "2", "3"}
    assert after.rejected == (late,)
    assert after.full_gen == 8


def test_with_an_update_the_whole_global_is_still_to_come() -> None:
    before = replace(STATE, full_gen=7)
    after = advance(before, update=Ref("u", 9))
    assert (after.full_gen, after.update) == (7, Ref("u", 9))
    assert protocol.full_is_due(after)
    assert not protocol.full_is_due(advance(before))


def test_the_norms_of_the_last_twenty_are_remembered() -> None:
    state = STATE
    for n in range(30):
        state = advance(state, measured=[Measured(norm=float(n), cosine=1.0)])
    assert state.norms == tuple(float(n) for n in range(10, 30))


# --- late contributions ---


def test_a_late_contribution_is_known_by_the_bytes_it_started_from() -> None:
    state = advance(advance(max_staleness=2), global_weights=Ref("g9", 1), max_staleness=2)
    assert [(s.gen, s.ref.sha256) for s in state.recent] == [(8, "g8"), (7, "g7")]
    late = replace(GOOD, seq=9)
    known = [protocol.has_known_base(late, state, most) for most in (0, 1, 2)]
    assert known == [False, False, True]
    assert not protocol.has_known_base(replace(late, base_sha256="other"), state, 2)


def test_a_late_contribution_weighs_less() -> None:
    state = advance(advance(max_staleness=2), global_weights=Ref("g9", 1), max_staleness=2)
    weights = [protocol.merge_weight(replace(GOOD, base_gen=gen), state, 0.25) for gen in (9, 8, 7)]
    assert weights == [100.0, 80.0, pytest.approx(100 / 1.5)]


def test_an_overtaken_interval_is_finished_only_if_it_will_still_count() -> None:
    fleet = FleetConfig(local_steps=10, max_staleness=1)
    assert protocol.may_finish(7, 1, fleet)
    assert not protocol.may_finish(6, 1, fleet)
    assert not protocol.may_finish(9, 2, fleet)
    assert not protocol.may_finish(9, 1, FleetConfig(local_steps=10))


# --- rollback ---

TARGET = replace(STATE, gen=5, parent_gen=4, step=50, tokens=500, cursors={"1": {"rows": 20}})


def test_a_rollback_is_a_new_generation_with_old_weights() -> None:
    target = replace(TARGET, global_weights=Ref("g5", 100))
    after = protocol.rolled_back(STATE, target)
    assert (after.gen, after.parent_gen, after.restored_from) == (8, 5, 5)
    assert (after.global_weights.sha256, after.step, after.tokens) == ("g5", 50, 500)
    assert after.cursors == {"1": {"rows": 20}}
    assert (after.epoch, after.merger_id, after.accepted, after.recent) == (3, "", (), ())


@pytest.mark.parametrize("base", [GOOD, replace(GOOD, base_gen=5, base_sha256="g5")])
def test_nothing_made_before_a_rollback_enters_after_it(base: Contribution) -> None:
    """The report's rule iii, even when a contribution names the very bytes that were restored."""
    after = protocol.rolled_back(STATE, replace(TARGET, global_weights=Ref("g5", 100)))
    assert judge(replace(base, cursor_start={"rows": 20}), after) == "stale_base"


def test_a_restored_average_counts_the_restored_global_once() -> None:
    has_it = replace(TARGET, ema=Average(Ref("e", 1), 5, 5))
    lacks_it = replace(TARGET, ema=Average(Ref("e", 1), 4, 4))
    with_it = protocol.rolled_back(STATE, has_it)
    without = protocol.rolled_back(STATE, lacks_it)
    assert not protocol.ema_is_due(with_it)
    assert protocol.ema_is_due(without)


UNTRAINED = replace(STATE, gen=0, parent_gen=None, step=0, tokens=0, cursors={})


def test_untrained_weights_enter_no_average_when_they_are_restored_either() -> None:
    restored = protocol.rolled_back(STATE, UNTRAINED)
    assert restored.gen == 8
    assert not protocol.ema_is_due(restored)
    assert not protocol.swa_is_due(restored, FleetConfig(swa_from_step=0))
    assert not protocol.snapshot_is_due(restored, FleetConfig(snapshot_every=4))


# --- terms and averages ---


def test_a_claim_begins_a_new_epoch_and_changes_nothing_else() -> None:
    claimed = protocol.claimed(STATE, "me")
    assert claimed == replace(STATE, epoch=3, merger_id="me")


def test_a_released_term_may_be_claimed_at_once() -> None:
    assert protocol.released(protocol.claimed(STATE, "me")).merger_id == ""


def test_the_ema_counts_every_generation_once_and_never_the_untrained_one() -> None:
    assert not protocol.ema_is_due(UNTRAINED)
    once = replace(STATE, ema=protocol.averaged(None, Ref("e", 1), 7))
    assert protocol.ema_is_due(STATE)
    assert not protocol.ema_is_due(once)
    assert once.ema == Average(Ref("e", 1), 1, 7)
    assert protocol.averaged(once.ema, Ref("f", 1), 8) == Average(Ref("f", 1), 2, 8)


def test_the_swa_begins_at_its_step() -> None:
    fleet = FleetConfig(swa_from_step=70)
    assert protocol.swa_is_due(STATE, fleet)
    assert not protocol.swa_is_due(replace(STATE, step=69), fleet)
    assert not protocol.swa_is_due(STATE, FleetConfig())
    assert not protocol.swa_is_due(replace(STATE, swa=Average(Ref("s", 1), 1, 7)), fleet)


def test_only_the_newest_snapshots_are_kept() -> None:
    fleet = FleetConfig(snapshot_every=7)
    assert protocol.snapshot_is_due(STATE, fleet)
    state = protocol.with_snapshot(STATE, 2)
    assert not protocol.snapshot_is_due(state, fleet)
    for gen in (14, 21):
        state = protocol.with_snapshot(replace(state, gen=gen), 2)
    assert [s.gen for s in state.snapshots] == [14, 21]


@given(st.permutations([replace(GOOD, worker=w, seq=s) for w in (0, 1, 2) for s in (1, 2)]))
def test_the_summation_order_does_not_depend_on_arrival(arrived: list[Contribution]) -> None:
    ordered = protocol.summation_order(arrived)
    assert [(c.worker, c.seq) for c in ordered] == [(w, s) for w in (0, 1, 2) for s in (1, 2)]


def test_a_state_survives_json() -> None:
    full = replace(
        advance(update=Ref("u", 2), momentum=Ref("m", 3), max_staleness=1, guard_ce=3.5),
        ema=Average(Ref("e", 1), 4, 8),
        swa=Average(Ref("s", 1), 2, 8),
        snapshots=(Saved(3, Ref("x", 1)),),
        restored_from=3,
        alert="look",
    )
    assert records.state_from_json(json.loads(dump_json(records.to_json(full)))) == full


@pytest.mark.parametrize(
    ("lane", "worker"), [("w-00", 0), ("w-12", 12), ("main", None), ("w-x", None)]
)
def test_lanes_of_workers_are_told_from_others(lane: str, worker: int | None) -> None:
    assert records.worker_of(lane) == worker


def test_a_state_of_an_older_version_may_lack_what_has_a_default() -> None:
    state = records.to_json(STATE)
    del state["snapshots"]
    assert records.state_from_json(state) == replace(STATE, snapshots=())
    del state["run_id"]
    with pytest.raises(UserError, match="lacks the field 'run_id'"):
        records.state_from_json(state)
