"""Processes beside workers and mergers: a person who rolls the run back, and writers that lie.

The liars are what a fleet meets in practice: a checkpoint of another run or configuration left in
a notebook, a push made on weights that are no longer the global, a zombie that overwrites the lane
of its successor. Each must be refused, with the reason given here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from diffurefill.config import UserError
from diffurefill.fleet import records
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Contribution, Identity, Registration, State
from diffurefill.fleet.rollback import rolling_back
from diffurefill.fleet.run import Run
from diffurefill.fleet.simulate import provenance
from diffurefill.fleet.simulate.provenance import CODEC, Delta
from diffurefill.store.base import Change, Publication, Ref, dump_json

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
    run: Run, to: int | None, jitter: random.Random, restage: Callable[[], None]
) -> Generator[float, None, None]:
    """What a person does with `diffurefill rollback`; where it finds nothing whole to return to, a
    copy of the files is put back (`restage`)."""
    apply = provenance.apply_update
    try:
        yield from rolling_back(run.store, run.cache, to, _silent, apply, jitter)
    except UserError:
        restage()


def _silent(line: str) -> None:
    pass


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
        moment_steps=0,
        delta_norm=1.0,
        loss_mean=1.0,
        **{**honest, **LIES[kind][1]},
    )
