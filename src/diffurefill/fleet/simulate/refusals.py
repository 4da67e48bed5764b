"""Contributions that were not merged: none is lost, and each is refused for the one right reason.

Part of the ledger (invariants.py), worked out from the true history alone: I15, I19 and the cases
of spec fleet.md 5.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from diffurefill.fleet.records import Identity, worker_of, worker_paths
from diffurefill.fleet.simulate import provenance
from diffurefill.fleet.simulate.history import History, Json


def identity(c: Mapping[str, Any]) -> Identity:
    return (c["worker"], c["incarnation"], c["seq"])


def parsed(content: bytes) -> Json | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def undecided(ledger: History, state: Json) -> set[Identity]:
    """Sound contributions to the current global that lie on the lanes for all to see."""
    found, hub = set[Identity](), ledger.hub
    for lane in hub.lanes():
        worker, head = worker_of(lane), hub.head(lane)
        path = worker_paths(worker).manifest if worker is not None else ""
        if head is None or path not in head.files:
            continue
        if hub.clock() - hub.published_at[lane, head.id] < hub.lag_seconds:
            continue
        c = parsed(ledger.blob(head.files[path].sha256))
        if c is None or not base_is_known(c, state, 0):
            continue
        sound = c["payload"]["sha256"] not in hub.damaged
        if sound and identity(c) not in {*ledger.accepted, *ledger.rejected}:
            found.add(identity(c))
    return found


def base_is_known(c: Json, state: Json, max_staleness: int) -> bool:
    bases = [(state["gen"], state["global_weights"])]
    bases += [(saved["gen"], saved["ref"]) for saved in state["recent"][:max_staleness]]
    return any((c["base_gen"], c["base_sha256"]) == (gen, ref["sha256"]) for gen, ref in bases)


def check_leftovers(ledger: History, after: Json) -> None:
    """I15: what lay there when the term began is decided before the fleet goes on."""
    told = {identity(r) for r in [*after["accepted"], *after["rejected"]]}
    lost = ledger.leftovers - told - ledger.rejected.keys()
    for worker, _, seq in sorted(lost):
        what = f"generation {after['gen']} left out worker {worker}'s contribution {seq}"
        ledger.check("I15", False, what)
    ledger.leftovers = set()


def check_considered(ledger: History, after: Json, writer: str) -> None:
    """I19: a merger that looked at a payload says what became of it."""
    looked = ledger.hub.fetched_by.get(writer, set())
    told = {identity(r) for r in [*after["accepted"], *after["rejected"]]}
    for key, c in ledger.pushed.items():
        if c["payload"]["sha256"] in looked and c["base_gen"] == after["gen"] - 1:
            decided = key in told or key in ledger.rejected or key in ledger.accepted
            what = f"worker {c['worker']}'s contribution {c['seq']} was dropped without a word"
            ledger.check("I19", decided, what)


def check_rejections(ledger: History, before: Json, after: Json) -> None:
    for r in after["rejected"]:
        key, reason = identity(r), r["reason"]
        if key in ledger.rejected:
            continue
        ledger.rejected[key] = reason
        who = f"worker {r['worker']}'s contribution {r['seq']}"
        ledger.check("I5", key not in ledger.accepted, f"{who} was accepted and then rejected")
        c = ledger.pushed.get(key)
        if c is None:
            ledger.check("I19", False, f"{who} was rejected but never pushed")
            continue
        right = right_reasons(ledger, c, before)
        lie = f" ({ledger.lies[key]})" if key in ledger.lies else ""
        ledger.check("5.4", reason in right, f"{who}{lie}: {reason or 'no reason'}, not {right}")


def right_reasons(ledger: History, c: Json, state: Json) -> tuple[str, ...]:
    """Why `c` could not enter the generation after `state`; empty for a sound contribution."""
    digests = {"run": "run_id", "config": "config_sha", "schema": "schema_sha"}
    foreign = tuple(reason for reason, field in digests.items() if c[field] != state[field])
    if foreign or c["codec"] != provenance.CODEC:
        return foreign[:1] or ("codec",)
    if not base_is_known(c, state, ledger.fleet.max_staleness):
        return ("stale_base",)
    moved = c["cursor_start"] != state["cursors"].get(str(c["worker"]))
    rest = ("slot_cursor",) if moved else () if c["steps"] > 0 else ("no_steps",)
    if ledger.lies.get(identity(c)) == "zombie":  # a successor may have inherited it meanwhile
        return ("incarnation", *rest)
    return rest or _faults_of_bytes(ledger, c)


def _faults_of_bytes(ledger: History, c: Json) -> tuple[str, ...]:
    sha256 = c["payload"]["sha256"]
    if sha256 in ledger.hub.damaged or sha256 not in ledger.hub.blobs:
        return ("corrupt",)
    delta = provenance.load_delta(ledger.hub.blobs[sha256])
    if not delta.finite:
        return ("nonfinite",)
    huge = ("norm", "guard") if delta.norm > 1000 else ()
    return huge or (("guard",) if delta.poisons else ())
