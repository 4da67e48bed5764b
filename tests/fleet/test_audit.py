"""The audit passes a sound run and fails loudly on one whose files were tampered with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffurefill.fleet import protocol
from diffurefill.fleet.audit import Audit, audit_run
from diffurefill.fleet.protocol import State
from diffurefill.fleet.run import read_state
from diffurefill.store.base import MAIN, Ref, Version, dump_json
from tests.fleet.fakes import FakeAverager, FakeFleet, MemoryStore, write_weights

GENERATIONS = 4


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(1)
    fleet.until_generation(GENERATIONS)
    fleet.run_until(lambda: fleet.state.ema.gen == GENERATIONS)
    return fleet


def audit(fleet: FakeFleet) -> Audit:
    return audit_run(fleet.store, FakeAverager(), fleet.folder / "audit", lambda line: None)


def violated(fleet: FakeFleet) -> set[str]:
    return {v.split()[0] for v in audit(fleet).violations}


def forge(fleet: FakeFleet, gen: int, change: Any) -> None:
    """Rewrite history: every version of generation `gen` gets the changed state and round record,
    with digests that fit, as somebody with write access to the store could do."""
    versions = fleet.store.versions[MAIN]
    for i, version in enumerate(versions):
        state = read_state(fleet.store, version)
        if state.gen != gen:
            continue
        forged = change(state)
        path = protocol.round_path(gen)
        record = json.loads(fleet.store.read(version.ref(path)))
        record = protocol.round_record(forged, Ref.from_json(record["base"]))
        files = dict(version.files)
        files[protocol.STATE] = put(fleet, dump_json(protocol.to_json(forged)))
        files[protocol.GLOBAL] = forged.global_weights
        files[path] = put(fleet, dump_json(record))
        versions[i] = Version(version.lane, version.id, version.nonce, files)


def put(fleet: FakeFleet, content: bytes) -> Ref:
    path = fleet.folder / "forged"
    path.write_bytes(content)
    return fleet.store.stage(path)


def test_a_sound_run_passes_and_says_what_was_checked(fleet: FakeFleet) -> None:
    found = audit(fleet)
    assert found.verdict == "ok"
    assert found.generations == GENERATIONS
    assert all(found.checks[name] >= GENERATIONS for name in ("I1", "I2", "I3", "I5", "I9", "I10"))


@pytest.mark.parametrize("path", [protocol.GLOBAL, protocol.EMA, protocol.STATE])
def test_a_flipped_byte_is_found(fleet: FakeFleet, path: str) -> None:
    ref = fleet.store.head(MAIN).files[path]
    content = bytearray(fleet.store.blobs[ref.sha256])
    content[len(content) // 2] ^= 1
    fleet.store.blobs[ref.sha256] = bytes(content)
    assert audit(fleet).verdict != "ok"


def test_a_flipped_byte_in_an_old_payload_is_found(fleet: FakeFleet) -> None:
    payload = fleet.accepted()[0].payload
    fleet.store.blobs[payload.sha256] = fleet.store.blobs[payload.sha256].replace(b"w", b"v")
    assert "files" in violated(fleet)


def test_two_swapped_contributions_are_found(fleet: FakeFleet) -> None:
    """Payloads exchanged between two workers give the same mean; the workers' lanes tell."""

    def swap(state: State) -> State:
        a, b = state.accepted
        swapped = (replace(a, payload=b.payload), replace(b, payload=a.payload))
        return replace(state, accepted=swapped)

    forge(fleet, 2, swap)
    assert violated(fleet) == {"I5"}


def test_a_contribution_moved_to_another_generation_is_found(fleet: FakeFleet) -> None:
    first = next(c for c in fleet.accepted() if c.base_gen == 0)

    def move(state: State) -> State:
        return replace(state, accepted=(first, *state.accepted[1:]))

    forge(fleet, 3, move)
    assert {"I3", "I4", "I9"} <= violated(fleet)


def test_a_repeated_contribution_is_found(fleet: FakeFleet) -> None:
    forge(fleet, 2, lambda s: replace(s, accepted=(*s.accepted, s.accepted[0])))
    assert {"I4", "I9", "I16"} <= violated(fleet)


def test_a_global_that_is_not_the_mean_is_found(fleet: FakeFleet) -> None:
    path = fleet.folder / "other"
    write_weights(path, {"smuggled": 1})
    ref = fleet.store.stage(path)
    forge(fleet, GENERATIONS, lambda s: replace(s, global_weights=ref))
    assert "I9" in violated(fleet)


def test_a_dropped_contribution_is_found(fleet: FakeFleet) -> None:
    forge(fleet, 2, lambda s: replace(s, accepted=s.accepted[:1]))
    assert {"I9", "I16"} <= violated(fleet)


def test_an_ema_that_counts_a_generation_twice_is_found(fleet: FakeFleet) -> None:
    def recount(state: State) -> State:
        return replace(state, ema=replace(state.ema, count=state.ema.count + 1))

    forge(fleet, GENERATIONS, lambda s: recount(s) if s.ema.gen == GENERATIONS else s)
    assert violated(fleet) == {"I10"}


def test_a_generation_number_used_twice_is_found(fleet: FakeFleet) -> None:
    head = fleet.store.head(MAIN)
    old = next(v for v in fleet.store.history(MAIN) if read_state(fleet.store, v).gen == 1)
    fleet.store.publish(MAIN, dict(old.files), expect=head)
    assert {"I1"} <= violated(fleet)


def test_a_run_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run at"):
        audit_run(MemoryStore(), FakeAverager(), tmp_path, lambda line: None)
