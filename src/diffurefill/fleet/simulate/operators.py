"""Processes beside workers and mergers: a person who rolls the run back, and writers that lie.

The liars are what a fleet meets in practice: a checkpoint of another run or configuration left in
a notebook, a push made on weights that are no longer the global, a zombie that overwrites the lane
of its successor. Each must be refused, with the reason given here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from diffurefill.fleet import protocol, records
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Contribution, Identity, Registration, State
from diffurefill.fleet.run import Run
from diffurefill.fleet.simulate.provenance import CODEC, Delta
from diffurefill.store.base import MAIN, Change, Conflict, NotFound, Publication, Ref, dump_json

ABSENT = "0" * 64

LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "other run": ("run", {"run_id": "another"}),
    "other config": ("config", {"config_sha": ABSENT}),
    "other schema": ("schema", {"schema_sha": ABSENT}),
    "other codec": ("codec", {"codec": "from the future"}),
    "other weights": ("stale_base", {"base_sha256": ABSENT}),
    "other rows": ("slot_cursor", {"cursor_start": {"rows": 3}, "cursor_end": {"rows": 7}}),
    "no steps": ("no_steps", {"steps": 0}),
    "zombie": ("incarnation", {}),
}
"""What is wrong with a forged contribution -> (the reason to reject it, what its manifest says)."""


def roll_back(
    run: Run, io: Patience, choose: Callable[[State], int | None]
) -> Generator[float, None, None]:
    """Publish an earlier generation again as a new one; tried again when it is overtaken."""
    while True:
        now = yield from io(run.snapshot)
        target = choose(now.state)
        if target is None:
            return
        ref = now.version.ref(records.round_path(target))
        record = yield from io(lambda ref=ref: run.store.read(ref))
        state = protocol.rolled_back(
            now.state, records.state_from_json(json.loads(record)["state"])
        )
        publication = Publication(run.store, MAIN, _files(state, now.state), expect=now.version)
        try:
            yield from io(publication.attempt)
        except (Conflict, NotFound):
            continue
        return


def _files(state: State, before: State) -> dict[str, Change]:
    """A rolled-back version: its record, the weights and averages it names, and no others."""
    kept = {s.gen for s in state.snapshots}
    return {
        records.STATE: dump_json(records.to_json(state)),
        records.round_path(state.gen): dump_json(
            records.round_record(state, before.global_weights)
        ),
        records.GLOBAL: state.global_weights,
        records.EMA: state.ema.ref if state.ema else None,
        records.SWA: state.swa.ref if state.swa else None,
        **{records.snapshot_path(s.gen): None for s in before.snapshots if s.gen not in kept},
    }


def lie(
    run: Run, io: Patience, number: int, kind: str, name: str, told: Callable[[Identity, str], None]
) -> Generator[float, None, None]:
    """Push one forged contribution under `number`; `told(identity, kind)` before it lands.

    A zombie lays it over another's lane; the others register first.
    """
    now = yield from io(run.snapshot)
    lane, paths = records.lane_of(number), records.worker_paths(number)
    head = yield from io(lambda: run.store.head(lane))
    payload = run.cache / "lie"
    c = _forged(now.state, number, kind, name)
    start, end = c.cursor_start or {"rows": 0}, c.cursor_end or {"rows": 0}
    delta = Delta(
        delta={name: Fraction(1)},
        slot=number,
        base=c.base_sha256,
        rows=(start["rows"], end["rows"]),
    )
    payload.write_bytes(delta.dump())
    ref = yield from io(lambda: run.store.stage(payload))
    c = replace(c, payload=ref)
    told(c.identity, kind)
    changes: dict[str, Change] = {
        paths.manifest: dump_json(records.to_json(c)),
        paths.payload: ref,
    }
    if kind != "zombie":
        registration = Registration(worker=number, incarnation=c.incarnation)
        changes[paths.registration] = dump_json(records.to_json(registration))
    yield from io(Publication(run.store, lane, changes, expect=head).attempt)


def _forged(state: State, number: int, kind: str, name: str) -> Contribution:
    """Sound but for what `kind` says."""
    start = state.cursor(number)
    honest: dict[str, Any] = {
        "run_id": state.run_id,
        "base_sha256": state.global_weights.sha256,
        "config_sha": state.config_sha,
        "schema_sha": state.schema_sha,
        "codec": CODEC,
        "steps": 4,
        "cursor_start": start,
        "cursor_end": {"rows": (start["rows"] if start else 0) + 4},
    }
    return Contribution(
        worker=number,
        incarnation=f"liar {name}",
        seq=1,
        base_gen=state.gen,
        payload=Ref(ABSENT, 0),
        tokens=40,
        delta_norm=1.0,
        loss_mean=1.0,
        **{**honest, **LIES[kind][1]},
    )
