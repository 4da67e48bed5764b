"""Every invariant has a run that breaks it, and the audit names exactly that one."""

from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.fleet import records
from diffurefill.fleet.audit import audit_run
from diffurefill.fleet.records import Inspection, Measured, Rejected, Saved, State
from diffurefill.store.base import MAIN, Ref, read_json
from tests.fleet.damage import (
    audit,
    damage,
    forge,
    forge_contribution,
    forge_last,
    forge_log,
    lay,
    put_weights,
    violated,
)
from tests.fleet.fakes import FakeAverager, FakeFleet
from tests.fleet.runs import KINDS, begun, recorded, roll_back, until


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return until(begun(tmp_path), 4)


@pytest.mark.parametrize("path", [records.GLOBAL, records.EMA, records.STATE])
def test_a_flipped_bit_in_a_file(fleet: FakeFleet, path: str) -> None:
    damage(fleet, fleet.store.head(MAIN).files[path])
    assert violated(fleet) == {"files"}


def test_a_flipped_bit_in_an_old_payload(fleet: FakeFleet) -> None:
    damage(fleet, fleet.accepted()[0].payload)
    assert violated(fleet) == {"files"}


def test_a_file_that_is_gone_though_nothing_was_compacted(fleet: FakeFleet) -> None:
    del fleet.store.blobs[fleet.states()[2].global_weights.sha256]
    assert violated(fleet) == {"files"}


def test_i1_a_generation_that_comes_twice(fleet: FakeFleet) -> None:
    old = [v for v in fleet.store.history(MAIN) if records.round_path(4) not in v.files][-1]
    fleet.store.publish(MAIN, dict(old.files), expect=fleet.store.head(MAIN))
    assert violated(fleet) == {"I1"}


def test_i2_two_sets_of_weights_for_one_generation(fleet: FakeFleet) -> None:
    other = put_weights(fleet, smuggled=1)
    forge_last(fleet, lambda s: replace(s, global_weights=other), global_b=other)
    assert violated(fleet) == {"I2"}


def test_i2_a_snapshot_of_other_weights(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path, snapshot_every=4), 4)
    other = put_weights(fleet, smuggled=1)
    forge_last(fleet, lambda s: replace(s, snapshots=(Saved(4, other),)))
    lay(fleet, -1, {records.snapshot_path(4): other})
    assert violated(fleet) == {"I2"}


def test_i3_a_contribution_made_on_other_weights(fleet: FakeFleet) -> None:
    forge_contribution(fleet, 2, lambda c: replace(c, base_sha256="0" * 64))
    assert violated(fleet) == {"I3"}


def test_i3_a_contribution_that_is_too_late(fleet: FakeFleet) -> None:
    first = fleet.states()[0]

    def late(c: records.Contribution) -> records.Contribution:
        return replace(c, base_gen=0, base_sha256=first.global_weights.sha256)

    forge_contribution(fleet, 3, late)
    assert violated(fleet) == {"I3"}


def test_i4_a_contribution_accepted_twice(fleet: FakeFleet) -> None:
    first = fleet.states()[1].accepted[0]
    forge(fleet, 3, lambda s: replace(s, accepted=(first, *s.accepted[1:])))
    assert {"I3", "I4"} <= violated(fleet)


def test_i4_a_contribution_accepted_and_rejected(fleet: FakeFleet) -> None:
    c = fleet.states()[2].accepted[0]
    refused = Rejected(
        worker=c.worker, incarnation=c.incarnation, seq=c.seq, base_gen=1, reason="norm"
    )
    forge(fleet, 2, lambda s: replace(s, rejected=(refused,)))
    assert violated(fleet) == {"I4"}


def test_i4_the_same_bytes_under_two_names(fleet: FakeFleet) -> None:
    payload = fleet.states()[1].accepted[0].payload
    forge_contribution(fleet, 3, lambda c: replace(c, payload=payload))
    assert {"I4"} <= violated(fleet) <= {"I4", "I9", "I10"}


def test_i5_contributions_swapped_between_workers(fleet: FakeFleet) -> None:
    """The mean is the same; the workers' lanes tell."""

    def swap(state: State) -> State:
        a, b = state.accepted
        swapped = (replace(a, payload=b.payload), replace(b, payload=a.payload))
        return replace(state, accepted=swapped)

    forge(fleet, 2, swap)
    assert violated(fleet) == {"I5"}


@pytest.mark.parametrize("other", [1, 3])
def test_i5_a_parent_that_is_another_generation(fleet: FakeFleet, other: int) -> None:
    forge(fleet, 3, lambda s: replace(s, parent_gen=other))
    assert "I5" in violated(fleet)


def test_i5_a_rollback_that_smuggles_weights_in(fleet: FakeFleet) -> None:
    for name in ("merger", "w0", "w1"):
        fleet.kill(name)
    roll_back(fleet, 2)
    assert violated(fleet) == set()
    other = put_weights(fleet, smuggled=1)
    forge(fleet, 5, lambda s: replace(s, global_weights=other))
    assert violated(fleet) == {"I5"}


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"accepted": True}, "I5"),
        ({"measured": (Measured(norm=1.0, cosine=1.0),)}, "I5"),
        (
            {"rejected": (Rejected(worker=1, incarnation="a", seq=9, base_gen=4, reason="norm"),)},
            "I5",
        ),
        ({"recent": (Saved(4, Ref("0" * 64, 1)),)}, "I5"),
        ({"update": Ref("0" * 64, 1)}, "I5"),
        ({"momentum": Saved(5, Ref("0" * 64, 1))}, "I5"),
        ({"step": 16}, "I12"),
        ({"cursors": {}}, "I11"),
        ({"tokens": 320}, "I16"),
    ],
)
def test_a_rollback_that_is_more_than_its_target(
    fleet: FakeFleet, change: dict[str, object], invariant: str
) -> None:
    for name in ("merger", "w0", "w1"):
        fleet.kill(name)
    roll_back(fleet, 2)
    if "accepted" in change:
        change = {"accepted": fleet.states()[2].accepted[:1]}
    forge(fleet, 5, lambda s: replace(s, **change))
    assert invariant in violated(fleet)


def test_i6_an_average_that_is_not_the_one_the_state_names(fleet: FakeFleet) -> None:
    lay(fleet, -1, {records.EMA: put_weights(fleet, smuggled=1)})
    assert violated(fleet) == {"I6"}


def test_i6_another_configuration(fleet: FakeFleet) -> None:
    lay(fleet, 3, {records.CONFIG: fleet.state.global_weights})
    assert violated(fleet) == {"I6"}


@pytest.mark.parametrize(
    "change", [{"merger_id": "usurper"}, {"epoch": 0}, {"epoch": 7, "merger_id": "usurper"}]
)
def test_i7_a_publish_outside_its_term(fleet: FakeFleet, change: dict[str, object]) -> None:
    forge_last(fleet, lambda s: replace(s, **change))
    assert violated(fleet) == {"I7"}


def test_i7_a_publish_after_the_term_was_given_up(fleet: FakeFleet) -> None:
    forge(fleet, 3, lambda s: replace(s, merger_id=""))
    assert violated(fleet) == {"I7"}


def test_i8_weights_that_are_not_finite(fleet: FakeFleet) -> None:
    class Suspicious(FakeAverager):
        def inspect(self, payload: Path, codec: str, base: Path) -> Inspection:
            newest = payload.name == fleet.state.global_weights.sha256
            return Inspection("nonfinite" if newest else None, 1.0)

    found = audit_run(fleet.store, Suspicious(), fleet.folder / "audit", lambda line: None)
    assert found.violations == ["I8 violated: generation 4: nonfinite"]


def test_i8_a_generation_with_another_schema(fleet: FakeFleet) -> None:
    forge(fleet, 4, lambda s: replace(s, schema_sha="wider"))
    assert violated(fleet) == {"I8"}


def test_i9_a_global_that_is_not_the_mean(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.until_generation(3)
    other = put_weights(fleet, smuggled=1)
    forge(fleet, 3, lambda s: replace(s, global_weights=other))
    assert violated(fleet) == {"I9"}


def test_i9_a_dropped_contribution(fleet: FakeFleet) -> None:
    forge(fleet, 2, lambda s: replace(s, accepted=s.accepted[:1]))
    assert {"I9", "I11", "I16"} <= violated(fleet)


@pytest.mark.parametrize(
    ("kind", "path"), [("momentum", records.MOMENTUM), ("downlink", records.UPDATE)]
)
def test_i9_a_momentum_or_update_that_is_another_one(tmp_path: Path, kind: str, path: str) -> None:
    fleet = until(begun(tmp_path, **KINDS[kind]), 3)
    other = put_weights(fleet, smuggled=1)
    change = {"momentum": Saved(3, other)} if kind == "momentum" else {"update": other}
    forge(fleet, 3, lambda s: replace(s, **change))
    for index, version in enumerate(fleet.store.versions[MAIN]):
        if records.round_path(3) in version.files:
            lay(fleet, index, {path: other})
    assert violated(fleet) == {"I9"}


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_i10_an_average_that_counts_a_generation_twice(tmp_path: Path, name: str) -> None:
    fleet = until(begun(tmp_path, swa_from_step=4), 4)

    def recount(state: State) -> State:
        average = getattr(state, name)
        return replace(state, **{name: replace(average, count=average.count + 1)})

    forge_last(fleet, recount)
    assert violated(fleet) == {"I10"}


@pytest.mark.parametrize(("name", "path"), [("ema", "global_ema"), ("swa", "swa")])
def test_i10_an_average_of_other_weights(tmp_path: Path, name: str, path: str) -> None:
    fleet = until(begun(tmp_path, swa_from_step=4), 4)
    other = put_weights(fleet, smuggled=1)

    def exchange(state: State) -> State:
        return replace(state, **{name: replace(getattr(state, name), ref=other)})

    forge_last(fleet, exchange, **{path: other})
    assert violated(fleet) == {"I10"}


def test_i10_a_rollback_that_goes_on_from_another_average(fleet: FakeFleet) -> None:
    for name in ("merger", "w0", "w1"):
        fleet.kill(name)
    roll_back(fleet, 2)
    forge(fleet, 5, lambda s: replace(s, ema=replace(s.ema, count=4)))
    assert violated(fleet) == {"I10"}


def test_i11_rows_that_were_left_out(fleet: FakeFleet) -> None:
    forge_contribution(fleet, 2, lambda c: replace(c, cursor_start={"rows": 6}))
    assert violated(fleet) == {"I11"}


def test_i11_a_cursor_that_moved_by_itself(fleet: FakeFleet) -> None:
    forge(fleet, 4, lambda s: replace(s, cursors={**s.cursors, "7": {"rows": 1}}))
    assert violated(fleet) == {"I11"}


def test_i12_a_step_that_does_not_add_up(fleet: FakeFleet) -> None:
    forge(fleet, 4, lambda s: replace(s, step=s.step + 1))
    assert violated(fleet) == {"I12"}


@pytest.mark.parametrize("facts", [{"step": 3}, {"gen": 0}])
def test_i12_a_worker_that_trained_at_another_step(fleet: FakeFleet, facts: dict[str, int]) -> None:
    forge_log(fleet, 0, "adopt", **facts)
    assert violated(fleet) == {"I12"}


def test_i13_is_not_claimed_to_be_checked(fleet: FakeFleet) -> None:
    (line,) = (line for line in audit(fleet).lines() if line.split()[0] == "I13")
    assert "not checked" in line
    assert "bench" in line


def test_i14_a_compaction_that_deleted_a_file_of_the_head(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path, compact_every=3), 4)
    del fleet.store.blobs[fleet.state.ema.ref.sha256]
    assert violated(fleet) == {"I14"}


def test_i14_a_round_record_that_is_gone(fleet: FakeFleet) -> None:
    for index in range(len(fleet.store.versions[MAIN])):
        lay(fleet, index, {records.round_path(2): None})
    assert violated(fleet) == {"I14"}


def test_i14_a_file_that_was_lost_after_the_compaction(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path, compact_every=3), 5)
    kept = next(s for s in recorded(fleet) if s.gen == 4)
    del fleet.store.blobs[kept.global_weights.sha256]
    assert violated(fleet) == {"files"}


def test_i15_a_sound_contribution_that_was_refused(tmp_path: Path) -> None:
    fleet = begun(tmp_path, min_fresh=3)
    fleet.add_worker(2, extra={"against": 1})
    until(fleet, 2)
    assert [r.reason for r in fleet.states()[2].rejected] == ["cosine"]
    assert violated(fleet) == set()
    for reason in ("stale_base", "slot_cursor", "no_steps", "codec", "run", "config"):

        def refused(state: State, reason: str = reason) -> State:
            return replace(state, rejected=(replace(state.rejected[0], reason=reason),))

        forge(fleet, 2, refused)
        assert violated(fleet) == {"I15"}


def test_i15_a_sound_contribution_that_was_refused_before_the_next_generation(
    fleet: FakeFleet,
) -> None:
    """Only the newest version tells of it: its merger died before it published again."""
    fleet.kill("merger")
    fleet.run_until(lambda: False, seconds=60)
    manifest = read_json(fleet.store, fleet.store.head("w-00"), records.worker_paths(0).manifest)
    c = records.contribution_from_json(manifest)
    assert c.base_gen == fleet.state.gen
    assert violated(fleet) == set()
    refused = Rejected(
        worker=0, incarnation=c.incarnation, seq=c.seq, base_gen=c.base_gen, reason="config"
    )
    forge_last(fleet, lambda s: replace(s, rejected=(*s.rejected, refused)))
    assert "I15" in violated(fleet)


def test_i15_a_contribution_that_lay_there_and_was_passed_over(fleet: FakeFleet) -> None:
    """Its merger saw it, and no generation tells what became of it."""
    untold = replace(fleet.states()[4].roster["1"], seq=1)
    forge(fleet, 4, lambda s: replace(s, roster={**s.roster, "1": untold}))
    assert "I15" in violated(fleet)


def test_i16_tokens_that_do_not_add_up(fleet: FakeFleet) -> None:
    forge(fleet, 4, lambda s: replace(s, tokens=s.tokens + 1))
    assert violated(fleet) == {"I16"}


def test_i16_a_version_that_tells_another_story(fleet: FakeFleet) -> None:
    forge_last(fleet, lambda s: replace(s, accepted=()))
    assert violated(fleet) == {"I16"}


def test_i16_a_contribution_that_its_worker_is_not_told_of(fleet: FakeFleet) -> None:
    forge(fleet, 4, lambda s: replace(s, roster={}))
    assert violated(fleet) == {"I15", "I16"}
