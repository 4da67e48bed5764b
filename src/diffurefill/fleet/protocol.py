"""The fleet's rules as pure functions of its records: no torch, no I/O, no clock.

Which contribution may enter the next global, and what every publish makes of the state. When a
round closes is in rounds.py, what counts as a sound delta in gates.py. Source: spec fleet.md 5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from diffurefill.config import FleetConfig
from diffurefill.fleet.records import (
    Average,
    Contribution,
    Cursor,
    Decided,
    Measured,
    Registration,
    Rejected,
    Saved,
    State,
)
from diffurefill.store.base import Ref

KEPT_NORMS = 20

# --- which contributions count -------------------------------------------------------------------

Verdict = Literal[
    "eligible", "decided", "run", "config", "schema", "codec", "stale_base", "incarnation",
    "slot_cursor", "no_steps",
]  # fmt: skip


def judge(
    contribution: Contribution,
    state: State,
    registration: Registration,
    codecs: Collection[str],
    max_staleness: int,
) -> Verdict:
    """Whether `contribution`, found on its worker's lane, may enter the next global, or why not.

    `decided` means it was accepted or rejected before and is no news. Bytes (hash, finiteness,
    norm) are checked by the merger after this, on the payload itself.
    """
    c = contribution
    if was_decided(c, state):
        return "decided"
    if c.run_id != state.run_id:
        return "run"
    if c.config_sha != state.config_sha:
        return "config"
    if c.schema_sha != state.schema_sha:
        return "schema"
    if c.codec not in codecs:
        return "codec"
    if not has_known_base(c, state, max_staleness):
        return "stale_base"
    if not holds_the_lane(c, registration):
        return "incarnation"
    if not starts_at_its_slot(c, state):
        return "slot_cursor"
    if c.steps <= 0 or c.tokens <= 0:
        return "no_steps"
    return "eligible"


def was_decided(c: Contribution, state: State) -> bool:
    last = state.roster.get(str(c.worker))
    return last is not None and last.incarnation == c.incarnation and c.seq <= last.seq


def has_known_base(c: Contribution, state: State, max_staleness: int) -> bool:
    """Made on the bytes of the current global, or of one at most `max_staleness` older."""
    current = Saved(state.gen, state.global_weights)
    bases = (current, *state.recent[:max_staleness])
    return any((c.base_gen, c.base_sha256) == (b.gen, b.ref.sha256) for b in bases)


def holds_the_lane(c: Contribution, registration: Registration) -> bool:
    return c.incarnation in (registration.incarnation, registration.inherited)


def starts_at_its_slot(c: Contribution, state: State) -> bool:
    """The slot's rows continue where the weights' cursor stands: none twice, none left out."""
    return c.cursor_start == state.cursor(c.worker)


def merge_weight(c: Contribution, state: State, discount: float) -> float:
    """Its weight in the mean: tokens, less when it is late (spec fleet.md 5.3)."""
    older = [saved.gen for saved in state.recent]
    staleness = older.index(c.base_gen) + 1 if c.base_gen in older else 0
    return c.tokens / (1.0 + discount * staleness)


def summation_order(contributions: Sequence[Contribution]) -> list[Contribution]:
    """The one order in which payloads are summed, so that anyone can recompute the same bytes."""
    return sorted(contributions, key=lambda c: (c.worker, c.seq))


LATE_SHARE = 0.7


def may_finish(steps: int, behind: int, config: FleetConfig) -> bool:
    """Whether an interval that was overtaken by `behind` generations is finished all the same: it
    is far enough on, and will still be merged though late (spec fleet.md 5.5)."""
    return behind <= config.max_staleness and steps >= LATE_SHARE * config.local_steps


# --- terms ---------------------------------------------------------------------------------------


def claimed(state: State, merger_id: str) -> State:
    """The state under a new merger's term. Whoever holds an older epoch can publish no more."""
    return replace(state, epoch=state.epoch + 1, merger_id=merger_id)


def released(state: State) -> State:
    """The term is given up: the next merger need not wait for the lease."""
    return replace(state, merger_id="")


def beaten(state: State, live: Sequence[int]) -> State:
    """A sign of life, and who is waited for."""
    return replace(state, beat=state.beat + 1, live=tuple(live))


# --- what a publish makes of the state -----------------------------------------------------------


def _decide(
    roster: Mapping[str, Decided], records: Sequence[Contribution | Rejected]
) -> dict[str, Decided]:
    def decided(r: Contribution | Rejected) -> Decided:
        reason = r.reason if isinstance(r, Rejected) else None
        return Decided(incarnation=r.incarnation, seq=r.seq, reason=reason)

    return {**roster, **{str(r.worker): decided(r) for r in records}}


def with_rejected(state: State, rejected: Sequence[Rejected]) -> State:
    """The same generation, more rejections on record: a waiting worker learns of them."""
    return replace(
        state,
        rejected=(*state.rejected, *rejected),
        roster=_decide(state.roster, rejected),
    )


def advanced(
    state: State,
    *,
    accepted: Sequence[Contribution],
    measured: Sequence[Measured],
    rejected: Sequence[Rejected],
    global_weights: Ref,
    update: Ref | None,
    momentum: Ref | None,
    guard_ce: float | None,
    looked: Mapping[str, str],
    live: Sequence[int],
    max_staleness: int,
) -> State:
    """The next generation. Step, tokens and slot cursors move only with accepted contributions.

    The step grows by the longest interval merged (equal for all but partial ones). A slot's cursor
    rides with the weights: rows of a contribution that was not accepted are read again. With an
    `update` the whole global is still to come.
    """
    gen = state.gen + 1
    recent = (Saved(state.gen, state.global_weights), *state.recent)[:max_staleness]
    return replace(
        state,
        gen=gen,
        parent_gen=state.gen,
        restored_from=None,
        recent=recent,
        global_weights=global_weights,
        full_gen=state.full_gen if update else gen,
        update=update,
        momentum=Saved(gen, momentum) if momentum else None,
        step=state.step + max(c.steps for c in accepted),
        tokens=state.tokens + sum(c.tokens for c in accepted),
        accepted=tuple(accepted),
        measured=tuple(measured),
        rejected=tuple(rejected),
        norms=(*state.norms, *(m.norm for m in measured))[-KEPT_NORMS:],
        guard_ce=guard_ce,
        looked=dict(looked),
        alert="",
        live=tuple(live),
        roster=_decide(state.roster, [*rejected, *accepted]),
        cursors=_moved(state.cursors, accepted),
    )


def _moved(cursors: Mapping[str, Cursor], accepted: Sequence[Contribution]) -> dict[str, Cursor]:
    ends = {str(c.worker): c.cursor_end for c in accepted if c.cursor_end is not None}
    return {**cursors, **ends}


def rolled_back(state: State, target: State) -> State:
    """A new generation with the weights, position and averages of `target`, an earlier one.

    The generation's number is new, so whatever was made on the old one or on any later one is
    stale. An average that had `target` in it has the new generation in it too: it is the same
    weights. Decisions on contributions stand.
    """
    gen = state.gen + 1
    return replace(
        target,
        gen=gen,
        parent_gen=target.gen,
        restored_from=target.gen,
        recent=(),
        full_gen=gen,
        update=None,
        epoch=state.epoch + 1,
        merger_id="",
        beat=state.beat,
        live=(),
        momentum=replace(target.momentum, gen=gen) if target.momentum else None,
        ema=_carried(target.ema, target.gen, gen),
        swa=_carried(target.swa, target.gen, gen),
        snapshots=tuple(s for s in state.snapshots if s.gen <= target.gen),
        accepted=(),
        measured=(),
        rejected=(),
        looked={},
        alert="",
        compacted_gen=state.compacted_gen,
        roster=state.roster,
    )


def _carried(average: Average | None, target_gen: int, gen: int) -> Average | None:
    if average is None:
        return None
    holds_target = average.gen == target_gen
    return replace(average, gen=gen if holds_target else gen - 1)


def compacted(state: State) -> State:
    """On record before anything is deleted: older files may be gone from here on."""
    return replace(state, compacted_gen=state.gen)


# --- the second publish: what follows a new global -----------------------------------------------


def is_untrained(state: State) -> bool:
    """Whether it has the weights that the run began with: generation 0, or one that restores it.
    They enter no average and no snapshot."""
    return state.step == 0


def ema_is_due(state: State) -> bool:
    """Whether this generation is missing from the EMA."""
    return not is_untrained(state) and state.gen > (state.ema.gen if state.ema else 0)


def swa_is_due(state: State, config: FleetConfig) -> bool:
    """Whether this generation belongs to the SWA and is missing from it."""
    if config.swa_from_step is None or state.step < config.swa_from_step or is_untrained(state):
        return False
    return state.swa is None or state.gen > state.swa.gen


def snapshot_is_due(state: State, config: FleetConfig) -> bool:
    every, kept = config.snapshot_every, {s.gen for s in state.snapshots}
    if every == 0 or is_untrained(state):
        return False
    return state.gen % every == 0 and state.gen not in kept


def full_is_due(state: State) -> bool:
    """Whether only an update of this generation is in the store."""
    return state.full_gen < state.gen


def averaged(average: Average | None, ref: Ref, gen: int) -> Average:
    """The average after generation `gen` was folded in."""
    return Average(ref=ref, count=average.count + 1 if average else 1, gen=gen)


def with_snapshot(state: State, keep: int) -> State:
    saved = Saved(state.gen, state.global_weights)
    return replace(state, snapshots=(*state.snapshots, saved)[-keep:])
