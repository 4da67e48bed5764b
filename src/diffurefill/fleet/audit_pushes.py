"""The audit's rules on what workers pushed, over the whole history, by records.

Source: spec fleet.md 4 (I4, I12, I15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from diffurefill.fleet import protocol, records
from diffurefill.fleet.audit_findings import Audit
from diffurefill.fleet.audit_history import History
from diffurefill.fleet.records import Contribution, Rejected, State
from diffurefill.store.base import Ref


def check_repeats(history: History, audit: Audit) -> None:
    """I4: by identity over all generations, by bytes along a lineage, where no row comes twice."""
    accepted = [c for state in history.first.values() for c in state.accepted]
    for identity, times in Counter(c.identity for c in accepted).items():
        audit.check("I4", times == 1, f"{identity} was accepted {times} times")
    refused = {r.identity for _, r in _rejections(history)}
    for c in accepted:
        audit.check("I4", c.identity not in refused, f"{c.identity} was accepted and rejected")
    tips = [g - 1 for g, s in history.first.items() if s.restored_from is not None]
    for tip in {*tips, history.newest.gen}:
        shas = [c.payload.sha256 for s in _lineage(history, tip) for c in s.accepted]
        for sha, times in Counter(shas).items():
            audit.check("I4", times == 1, f"payload {sha} is {times} times in generation {tip}")


def _lineage(history: History, gen: int | None) -> Iterator[State]:
    """A generation and its ancestors, newest first."""
    while gen is not None and (state := history.first.get(gen)) is not None:
        yield state
        gen = state.parent_gen if state.parent_gen is None or state.parent_gen < gen else None


def _rejections(history: History) -> list[tuple[int, Rejected]]:
    """Every rejection on record, with the generation that it was judged against."""
    found = {(s.gen - 1, r) for s in history.first.values() for r in s.rejected}
    for entry in history.entries:
        first = history.first.get(entry.state.gen, entry.state)
        told_early = set(entry.state.rejected) - set(first.rejected)
        found |= {(entry.state.gen, r) for r in told_early}
    return sorted(found, key=lambda pair: (pair[0], pair[1].identity))


def refused_as_damaged(history: History) -> set[Ref]:
    """Payloads that were refused because their bytes are not what they should be."""
    accepted = {c.payload for state in history.first.values() for c in state.accepted}
    found = set()
    for _, rejected in _rejections(history):
        lane = history.lanes.get(rejected.worker)
        if rejected.reason == "corrupt" and lane is not None:
            found |= {c.payload for c in lane.pushed.get(rejected.identity, ())}
    return found - accepted


def check_rejections(history: History, codecs: Collection[str], audit: Audit) -> None:
    """I15: what was refused for what its manifest says was refused for a true reason."""
    for gen, rejected in _rejections(history):
        if rejected.reason == "corrupt":
            continue  # its bytes tell: see Reader.excused
        judged = history.first.get(gen)
        lane = history.lanes.get(rejected.worker)
        pushed = lane.pushed.get(rejected.identity, []) if lane else []
        if judged is None or len(pushed) != 1:  # deleted, or two processes under one name
            audit.unchecked["I15"] += 1
            continue
        true = _is_true(rejected, pushed[0], judged, history.config.max_staleness, codecs)
        if true is None:
            audit.unchecked["I15"] += 1
        else:
            who = f"worker {rejected.worker}, contribution {rejected.seq}"
            audit.check("I15", true, f"{who} was refused for {rejected.reason}, wrongly")


def check_leftovers(history: History, audit: Audit) -> None:
    """I15: whatever a merger found on a lane is in the generation it made, or was refused."""
    for gen, state in history.first.items():
        for name, nonce in state.looked.items():
            worker = records.worker_of(name)
            lane = history.lanes.get(worker) if worker is not None else None
            c = lane.at.get(nonce) if lane else None
            if c is None:  # compacted away
                audit.unchecked["I15"] += 1
                continue
            who = f"worker {c.worker}, contribution {c.seq}"
            decided = protocol.was_decided(c, state)
            audit.check("I15", decided, f"{who} lay there when generation {gen} was made, untold")


def _is_true(
    rejected: Rejected, c: Contribution, state: State, late: int, codecs: Collection[str]
) -> bool | None:
    """Whether the reason holds; None for reasons that rest on bytes or on the moment."""
    match rejected.reason:
        case "run":
            return c.run_id != state.run_id
        case "config":
            return c.config_sha != state.config_sha
        case "codec":
            return c.codec not in codecs
        case "stale_base":
            return not protocol.has_known_base(c, state, late)
        case "slot_cursor":
            return not protocol.starts_at_its_slot(c, state)
        case "no_steps":
            return c.steps <= 0 or c.tokens <= 0
    return None


def check_steps_of_workers(history: History, audit: Audit) -> None:
    """I12: the step that workers logged, of which the learning rate is a function."""
    replaces = history.config.adoption == "replace"
    for worker, lane in history.lanes.items():
        for line in lane.log:
            state = history.first.get(line.get("gen", -1))
            if state is None or "step" not in line:
                continue
            at = f"worker {worker} trained generation {state.gen} at step {line['step']}"
            if line["phase"] == "adopt":
                audit.check("I12", line["step"] == state.step, at)
            elif line["phase"] == "train" and replaces:
                audit.check("I12", line["step"] == state.step + line["local_step"], at)
