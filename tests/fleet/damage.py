"""Damage done to a finished run, as a faulty disk or somebody with write access could do it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from diffurefill.fleet import records
from diffurefill.fleet.audit import Audit, audit_run
from diffurefill.fleet.records import Contribution, State
from diffurefill.fleet.run import read_state
from diffurefill.store.base import MAIN, Ref, Version, dump_json, read_json
from tests.fleet.fakes import FakeFleet, write_weights


def audit(fleet: FakeFleet) -> Audit:
    return audit_run(fleet.store, fleet.averager, fleet.folder / "audit", lambda line: None)


def violated(fleet: FakeFleet) -> set[str]:
    return {v.split()[0] for v in audit(fleet).violations}


def put(fleet: FakeFleet, content: bytes) -> Ref:
    path = fleet.folder / "forged"
    path.write_bytes(content)
    return fleet.store.stage(path)


def put_weights(fleet: FakeFleet, **weights: int) -> Ref:
    path: Path = fleet.folder / "forged"
    write_weights(path, weights)
    return fleet.store.stage(path)


def lay(fleet: FakeFleet, index: int, files: dict[str, Ref | None], lane: str = MAIN) -> None:
    """Version `index` of a lane always held these files (None: did not)."""
    versions = fleet.store.versions[lane]
    old = versions[index]
    kept = {p: ref for p, ref in {**old.files, **files}.items() if ref is not None}
    versions[index] = Version(old.lane, old.id, old.nonce, kept)


def forge_last(fleet: FakeFleet, change: Callable[[State], State], **files: Ref) -> None:
    """Only the newest version tells `change`; `files` by names without their suffix."""
    state = put(fleet, dump_json(records.to_json(change(fleet.state))))
    named = {f"{name}.safetensors": ref for name, ref in files.items()}
    lay(fleet, -1, {records.STATE: state, **named})


def forge(fleet: FakeFleet, gen: int, change: Callable[[State], State]) -> None:
    """Every version of generation `gen`, and its round record for ever after, tell `change`, with
    digests that fit."""
    path = records.round_path(gen)
    for index, version in enumerate(fleet.store.versions[MAIN]):
        files: dict[str, Ref | None] = {}
        state = read_state(fleet.store, version)
        if state.gen == gen:
            forged = change(state)
            files[records.STATE] = put(fleet, dump_json(records.to_json(forged)))
            if forged.global_weights != state.global_weights:
                files[records.GLOBAL] = forged.global_weights
        if path in version.files:
            record = read_json(fleet.store, version, path)
            told = change(records.state_from_json(record["state"]))
            base = Ref.from_json(record["base"])
            files[path] = put(fleet, dump_json(records.round_record(told, base)))
        lay(fleet, index, files)


def forge_contribution(
    fleet: FakeFleet, gen: int, change: Callable[[Contribution], Contribution]
) -> None:
    """The first contribution of generation `gen` is another one, on its worker's lane too."""

    def forged(state: State) -> State:
        return replace(state, accepted=(change(state.accepted[0]), *state.accepted[1:]))

    before = next(s for s in fleet.states() if s.gen == gen).accepted[0]
    forge(fleet, gen, forged)
    lane, path = records.lane_of(before.worker), records.worker_paths(before.worker).manifest
    manifest = put(fleet, dump_json(records.to_json(change(before))))
    for index, version in enumerate(fleet.store.versions[lane]):
        held = path in version.files and read_json(fleet.store, version, path)
        if held and records.contribution_from_json(held) == before:
            lay(fleet, index, {path: manifest}, lane)


def forge_log(fleet: FakeFleet, worker: int, phase: str, **facts: int) -> None:
    """The last line of `phase` in a worker's log says something else."""
    lane, path = records.lane_of(worker), records.worker_paths(worker).log
    content = fleet.store.read(fleet.store.head(lane).ref(path))
    lines = [json.loads(line) for line in content.decode().splitlines()]
    next(line for line in reversed(lines) if line["phase"] == phase).update(facts)
    log = "".join(json.dumps(line) + "\n" for line in lines).encode()
    lay(fleet, -1, {path: put(fleet, log)}, lane)


def damage(fleet: FakeFleet, ref: Ref) -> None:
    """One bit of a file flips."""
    content = bytearray(fleet.store.blobs[ref.sha256])
    content[len(content) // 2] ^= 1
    fleet.store.blobs[ref.sha256] = bytes(content)
