"""The rules as pure functions: what counts, when a round closes, what a publish does."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import FleetConfig
from diffurefill.fleet import protocol, records
from diffurefill.fleet.records import Contribution, Decided, Registration, Rejected, State
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
    delta_norm=1.0,
    loss_mean=2.0,
)
REGISTERED = Registration(worker=1, incarnation="a")


def judge(c: Contribution = GOOD, state: State = STATE, reg: Registration = REGISTERED) -> str:
    return protocol.judge(c, state, reg, CODEC)


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


@pytest.mark.parametrize(
    ("live", "recovering", "needed"),
    [(4, False, 2), (2, False, 2), (1, False, 1), (0, False, 1), (4, True, 1)],
)
def test_how_many_contributions_a_round_needs(live: int, recovering: bool, needed: int) -> None:
    fleet = FleetConfig(min_fresh=2)
    assert protocol.num_needed(fleet, live, recovering=recovering) == needed


@pytest.mark.parametrize(
    ("eligible", "live", "elapsed", "closes"),
    [
        (1, 4, 999.0, False),  # fewer than needed: grace cannot close it
        (2, 4, 10.0, False),  # two more may come
        (2, 4, 150.0, True),  # grace over
        (4, 4, 0.0, True),  # nobody left to wait for
        (3, 2, 0.0, True),
    ],
)
def test_when_a_round_closes(eligible: int, live: int, elapsed: float, closes: bool) -> None:
    closed = protocol.round_closes(
        FleetConfig(grace_seconds=150.0),
        num_eligible=eligible,
        num_live=live,
        needed=2,
        grace_elapsed=elapsed,
    )
    assert closed is closes


def test_grace_opens_at_the_nth_or_at_the_first_arrival() -> None:
    nth, first = FleetConfig(grace_from="nth"), FleetConfig(grace_from="first")
    assert [protocol.grace_opens(nth, n, 2) for n in (0, 1, 2)] == [False, False, True]
    assert [protocol.grace_opens(first, n, 2) for n in (0, 1, 2)] == [False, True, True]


def test_a_generation_moves_step_tokens_and_only_the_accepted_slots() -> None:
    other = replace(GOOD, worker=2, steps=8, tokens=80, cursor_end={"rows": 8})
    late = Rejected(worker=3, incarnation="c", seq=1, base_gen=6, reason="stale_base")
    after = protocol.advanced(
        STATE, accepted=[GOOD, other], rejected=[late], global_weights=Ref("g8", 100)
    )
    assert (after.gen, after.parent_gen, after.step, after.tokens) == (8, 7, 80, 880)
    assert after.cursors == {"1": {"rows": 50}, "2": {"rows": 8}}
    assert set(after.roster) == {"1", "2", "3"}
    assert after.rejected == (late,)


def test_a_claim_begins_a_new_epoch_and_changes_nothing_else() -> None:
    claimed = protocol.claimed(STATE, "me")
    assert claimed == replace(STATE, epoch=3, merger_id="me")


def test_the_ema_counts_every_generation_once_and_never_the_untrained_one() -> None:
    assert not protocol.ema_is_due(replace(STATE, gen=0))
    once = protocol.with_ema(STATE, Ref("e", 1))
    assert protocol.ema_is_due(STATE)
    assert not protocol.ema_is_due(once)
    assert (once.ema.count, once.ema.gen) == (1, 7)


@given(st.permutations([replace(GOOD, worker=w, seq=s) for w in (0, 1, 2) for s in (1, 2)]))
def test_the_summation_order_does_not_depend_on_arrival(arrived: list[Contribution]) -> None:
    ordered = protocol.summation_order(arrived)
    assert [(c.worker, c.seq) for c in ordered] == [(w, s) for w in (0, 1, 2) for s in (1, 2)]


def test_a_state_survives_json() -> None:
    full = protocol.with_ema(
        protocol.advanced(STATE, accepted=[GOOD], rejected=[], global_weights=GLOBAL), Ref("e", 1)
    )
    assert records.state_from_json(json.loads(dump_json(records.to_json(full)))) == full


@pytest.mark.parametrize(
    ("lane", "worker"), [("w-00", 0), ("w-12", 12), ("main", None), ("w-x", None)]
)
def test_lanes_of_workers_are_told_from_others(lane: str, worker: int | None) -> None:
    assert records.worker_of(lane) == worker
