"""Re-derive a run's whole history from its store and hold it against the protocol's invariants.

Nothing is believed that can be recomputed: every blob is verified by its sha256, every accepted
contribution is looked up on its worker's own lane, and every global and every EMA is computed
again from its recorded inputs and compared byte for byte. Source: spec fleet.md 4.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffurefill.config import RunConfig, UserError, loads
from diffurefill.fleet import protocol
from diffurefill.fleet.merger import Averager
from diffurefill.fleet.protocol import Contribution, State
from diffurefill.fleet.run import read_state
from diffurefill.store.base import MAIN, Ref, Store, StoreError, Version, read_json, sha256_file

INVARIANTS = {
    "files": "every file that a version names has its size and sha256",
    "I1": "generations grow one by one and are never reused; epochs never fall",
    "I2": "one generation is one set of weights",
    "I3": "every accepted contribution was made on the global it was merged into",
    "I4": "no contribution was accepted twice",
    "I5": "nothing enters from outside the lineage of its own global",
    "I9": "every global is, byte for byte, the mean of its recorded inputs",
    "I10": "the EMA holds exactly the published generations",
    "I16": "what was accepted is in the weights, the step and the token count",
}


@dataclass
class Audit:
    """What was checked how often, and what was found. `violations` is empty for a sound run."""

    generations: int = 0
    versions: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def check(self, invariant: str, holds: bool, what: str) -> bool:
        self.checks[invariant] += 1
        if not holds:
            self.violations.append(f"{invariant} violated: {what}")
        return holds

    @property
    def verdict(self) -> str:
        """`ok`, or the first violation."""
        return self.violations[0] if self.violations else "ok"


def audit_run(
    store: Store, averager: Averager, work: Path, report: Callable[[str], None] = print
) -> Audit:
    """Check every published version of the run at `store`; `work` holds temporary weights."""
    if store.head(MAIN) is None:
        raise UserError(f"no run at {store.uri}: make one with `diffurefill init`")
    work.mkdir(parents=True, exist_ok=True)
    audit = Audit()
    history = list(_history(store, work, audit))
    if not history:
        return audit
    lanes = _contributions(store, audit)
    _check_lineage(history, audit)
    for before, after in itertools.pairwise(_generations(history)):
        gen = after[1].gen
        report(f"audit: generation {gen}")
        record = _checked(
            audit, lambda v=after[0], g=gen: read_json(store, v, protocol.round_path(g))
        )
        if record is not None:
            _check_record(before[1], after[1], record, audit)
            _check_contributions(before[1], after[1], lanes, audit)
        _check_mean(store, averager, before[1], after[1], work, audit)
    _check_repeats(history, audit)
    _check_ema(store, averager, history, work, audit)
    return audit


# --- reading -------------------------------------------------------------------------------------

History = list[tuple[Version, State]]


def _checked(audit: Audit, read: Callable[[], Any]) -> Any | None:
    """The result of reading something that must be sound; None, and a violation, if it is not."""
    try:
        found = read()
    except (StoreError, UserError, ValueError, KeyError, TypeError) as error:
        audit.check("files", False, str(error))
        return None
    audit.check("files", True, "")
    return found


def _versions(store: Store, lane: str, audit: Audit) -> Iterator[Version]:
    try:
        yield from store.history(lane)
    except StoreError as error:
        audit.check("files", False, f"lane {lane}: {error}")


def _history(store: Store, work: Path, audit: Audit) -> Iterator[tuple[Version, State]]:
    """Every version of the main lane with its state; every file named is verified once."""
    verified: set[str] = set()
    for version in _versions(store, MAIN, audit):
        audit.versions += 1
        state = _checked(audit, lambda v=version: read_state(store, v))
        if state is None:
            continue
        audit.check(
            "I2",
            version.files.get(protocol.GLOBAL) == state.global_weights,
            f"version {version.id}: the state names other weights than the version holds",
        )
        for ref in version.files.values():
            if ref.sha256 not in verified:
                verified.add(ref.sha256)
                _checked(audit, lambda r=ref: store.fetch(r, work / "verified"))
        yield version, state


def _contributions(store: Store, audit: Audit) -> dict[tuple[int, str, int], Contribution]:
    """What every worker says it pushed, from the history of its own lane."""
    found: dict[tuple[int, str, int], Contribution] = {}
    for lane in store.lanes():
        worker = protocol.worker_of(lane)
        if worker is None:
            continue
        path = protocol.worker_paths(worker).manifest
        for version in _versions(store, lane, audit):
            if path in version.files:
                data = _checked(audit, lambda v=version, p=path: read_json(store, v, p))
                if data is not None:
                    c = protocol.contribution_from_json(data)
                    found[c.identity] = c
    return found


def _generations(history: History) -> History:
    """The first version of each generation, in order of publication."""
    first: dict[int, tuple[Version, State]] = {}
    for version, state in history:
        first.setdefault(state.gen, (version, state))
    return list(first.values())


# --- the invariants ------------------------------------------------------------------------------


def _check_lineage(history: History, audit: Audit) -> None:
    audit.generations = len(_generations(history)) - 1
    weights: dict[int, str] = {}
    for (_, before), (version, after) in itertools.pairwise(history):
        at = f"version {version.id}"
        step = after.gen - before.gen
        audit.check("I1", step in (0, 1), f"{at}: generation {before.gen} -> {after.gen}")
        audit.check("I1", after.epoch >= before.epoch, f"{at}: the epoch fell to {after.epoch}")
    for version, state in history:
        sha = weights.setdefault(state.gen, state.global_weights.sha256)
        audit.check(
            "I2",
            sha == state.global_weights.sha256,
            f"version {version.id}: generation {state.gen} has two sets of weights",
        )


def _check_record(before: State, after: State, record: dict[str, Any], audit: Audit) -> None:
    """`rounds/<gen>.json` tells the same as the state it was published with."""
    told = protocol.round_record(after, before.global_weights)
    same = json.dumps(told, sort_keys=True) == json.dumps(record, sort_keys=True)
    audit.check("I16", same, f"generation {after.gen}: its round record tells another story")
    audit.check(
        "I5",
        after.parent_gen == before.gen,
        f"generation {after.gen} names {after.parent_gen} as its parent, not {before.gen}",
    )
    steps = max((c.steps for c in after.accepted), default=0)
    tokens = sum(c.tokens for c in after.accepted)
    counted = after.step == before.step + steps and after.tokens == before.tokens + tokens
    audit.check("I16", counted, f"generation {after.gen}: steps or tokens do not add up")


def _check_contributions(
    before: State,
    after: State,
    lanes: dict[tuple[int, str, int], Contribution],
    audit: Audit,
) -> None:
    for c in after.accepted:
        who = f"generation {after.gen}: worker {c.worker}, contribution {c.seq}"
        on_base = c.base_gen == before.gen and c.base_sha256 == before.global_weights.sha256
        audit.check("I3", on_base, f"{who} was made on generation {c.base_gen} or other weights")
        audit.check("I5", lanes.get(c.identity) == c, f"{who} is not what its worker pushed")
        cursors = after.cursor(c.worker) == c.cursor_end
        audit.check("I16", cursors, f"{who}: its slot's cursor did not move with it")


def _check_repeats(history: History, audit: Audit) -> None:
    accepted = [c for _, state in _generations(history) for c in state.accepted]
    for name, key in (("identity", lambda c: c.identity), ("payload", lambda c: c.payload.sha256)):
        for value, times in Counter(map(key, accepted)).items():
            audit.check("I4", times == 1, f"{name} {value} was accepted {times} times")


def _check_mean(
    store: Store, averager: Averager, before: State, after: State, work: Path, audit: Audit
) -> None:
    what = f"generation {after.gen} is not the mean of its recorded contributions"
    accepted = protocol.summation_order(after.accepted)
    if not audit.check("I9", bool(accepted), what):
        return
    refs = [before.global_weights, after.global_weights, *(c.payload for c in accepted)]
    paths = _checked(audit, lambda: [_fetch(store, ref, work) for ref in refs])
    if paths is None:
        audit.check("I9", False, f"generation {after.gen} cannot be recomputed: a file is damaged")
        return
    base, published, payloads = paths[0], paths[1], paths[2:]
    again = work / "recomputed"
    weights = [float(c.tokens) for c in accepted]
    try:
        averager.mean(base, list(zip(payloads, weights, strict=True)), again)
        audit.check("I9", sha256_file(again) == after.global_weights, what)
    except ValueError as error:
        audit.check("I9", False, f"{what}: {error}")
    for path in {*payloads, base} - {published}:
        path.unlink(missing_ok=True)


def _check_ema(
    store: Store, averager: Averager, history: History, work: Path, audit: Audit
) -> None:
    """Recompute the EMA from the first generation on and compare wherever it was published."""
    decay = _config(store, history).fleet.ema_decay
    published = {s.ema.gen: s.ema for _, s in history if s.ema is not None}
    previous: Path | None = None
    for _, state in _generations(history)[1:]:
        new = _checked(audit, lambda s=state: _fetch(store, s.global_weights, work))
        if new is None:
            return
        current = work / f"ema-{state.gen}"
        averager.ema(previous, new, decay, current)
        if previous is not None:
            previous.unlink()
        new.unlink()
        previous, told = current, published.get(state.gen)
        if told is None:
            is_newest = state.gen == history[-1][1].gen  # its second publish may still be to come
            audit.check("I10", is_newest, f"generation {state.gen} is missing from the EMA")
            continue
        audit.check("I10", told.count == state.gen, f"the EMA of {state.gen} counts {told.count}")
        same = sha256_file(current) == told.ref
        audit.check("I10", same, f"the EMA at generation {state.gen} is not what its globals give")


def _config(store: Store, history: History) -> RunConfig:
    return loads(store.read(history[0][0].ref(protocol.CONFIG)).decode(), RunConfig())


def _fetch(store: Store, ref: Ref, work: Path) -> Path:
    path = work / ref.sha256
    return path if path.exists() else store.fetch(ref, path)
