"""One pass: mask, one denoiser call at the open positions, a token for each, accept some or all.

A draft pass accepts some of what is masked; a refill pass re-masks the least sure positions and
fills them all again. A row's result depends on its own canvas and seed alone: its random numbers
are keyed by (seed, stage, pass, block) and indexed by position. Source: spec algorithms 5.1-5.4.

Along a schedule nothing waits for a GPU: counts.py says why, docs/decoding.md for which stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.config import Stage
from diffurefill.decode import stages as schedule
from diffurefill.decode.counts import Counts, Numbers, each, masked_after, taken_back, tell
from diffurefill.decode.draws import Draws, State, place_waived, put, sureness
from diffurefill.decode.order import Sureness, accept, choose, order_score
from diffurefill.decode.record import Pass
from diffurefill.decode.run import At, Run
from diffurefill.decode.sampling import log_p_of
from diffurefill.decode.slots import Slots


@dataclass(frozen=True, eq=False)
class Region:
    """The positions a pass may write."""

    at: Tensor
    """(B, T) bool."""
    sizes: Numbers
    """How many in each row."""

    def without(self, rows: NDArray[np.bool_]) -> Region:
        if not rows.any():
            return self
        return Region(self.at & ~tell(rows, self.at.device)[:, None], self.sizes * ~rows)


def draft_pass(
    run: Run, stage: Stage, at: At, region: Region, state: State
) -> tuple[Pass, State] | None:
    """Fill some of what is masked in `region`; None when nothing is."""
    open_ = region.at & (state.ids == run.specials.mask_id)
    slots = _slots(run, stage, open_, state.masked.within(region.sizes > 0))
    if slots is None:
        return None
    draws = _draws(run, stage, at, region, state.ids, open_, slots)
    drawn = draws.draw(state.ids)
    sure = sureness(slots, drawn, state.confidence)
    score = _score(run, stage, at, region, open_, sure)
    kept = _each(run, region, partial(schedule.kept, stage, at.index))
    quota = (open_.sum(dim=1) - kept).clamp(min=schedule.least_accepted(stage))
    if schedule.is_last(stage, at.index):
        accepted = choose(score, open_, quota, stage.commit_gap)
    else:
        accepted = accept(stage, score, open_, quota, sure)
    after = put(state, slots, drawn, accepted)
    if schedule.is_last(stage, at.index):
        after = place_waived(draws, score, open_ & ~accepted, after)
        accepted = open_
    after = replace(after, masked=masked_after(stage, at.index, region.sizes, slots.counts))
    return _record(run, stage, at, state, after, accepted, torch.zeros_like(open_)), after


def refill_pass(
    run: Run, stage: Stage, at: At, region: Region, state: State
) -> tuple[Pass, State] | None:
    """Take back the least sure of `region` and fill them again; None when none may be."""
    knows = state
    if stage.confidence == "regrouped":
        asked = region.at & ~state.settled[:, None]
        judged = regrouped(run, asked, state.ids, stage.groups)
        knows = replace(state, confidence=torch.where(asked, judged, state.confidence))
    remasked = _to_remask(run, stage, at, region, knows)
    # A row with nothing to take back is done, and stays as it was: it would end here if alone.
    active = remasked.any(dim=1)
    knows = replace(
        knows,
        confidence=torch.where(active[:, None], knows.confidence, state.confidence),
        settled=state.settled | ~active,
    )
    slots = _slots(run, stage, remasked, taken_back(stage, region.sizes))
    if slots is None:
        return None
    seen = replace(knows, ids=state.ids.masked_fill(remasked, run.specials.mask_id))
    logits = None
    if stage.confidence == "shadow":
        logits, seen = _with_shadows(run, region, remasked, slots, seen)
    draws = _draws(run, stage, at, region, seen.ids, remasked, slots, logits)
    after = put(seen, slots, draws.draw(seen.ids), remasked)
    changed = (after.ids != state.ids).any(dim=1)
    unchanged = ~changed if stage.stop_unchanged else torch.zeros_like(changed)
    after = replace(after, times=state.times + remasked.long(), settled=seen.settled | unchanged)
    return _record(run, stage, at, state, after, remasked, remasked), after


def _to_remask(run: Run, stage: Stage, at: At, region: Region, state: State) -> Tensor:
    """What a refill pass takes back, (B, T) bool."""
    candidates = region.at & ~state.settled[:, None]
    if stage.remask_cap is not None:
        candidates = candidates & (state.times < stage.remask_cap)
    if stage.sure_above is not None:
        candidates = candidates & (state.confidence < math.log(stage.sure_above))
    count = _each(run, region, partial(schedule.remask_count, stage))
    score = _gumbel(run, at) if stage.order == "random" else -state.confidence
    return choose(score, candidates, count, stage.commit_gap)


def regrouped(run: Run, region: Tensor, ids: Tensor, groups: int) -> Tensor:
    """log p1 of the tokens standing in `region` (B, T), each judged from under a MASK; else 0.

    Positions are dealt out in turn; a group is masked together in a row of its own, all rows in
    one call. Nothing is approximate but that a token's group is hidden with it. Asks the device.
    """
    turn = (region.cumsum(dim=1) - 1) % groups
    at = torch.cat([region & (turn == g) for g in range(groups)])  # (groups * B, T)
    counts = Counts.exactly(run.ask(at.sum(dim=1)))
    judged = torch.zeros(at.shape, device=ids.device)
    if counts.total > 0:
        tall, slots = ids.repeat(groups, 1), Slots.at(at, counts)
        logits = run.logits(tall.masked_fill(at, run.specials.mask_id), slots)
        found = log_p_of(logits, slots.read(tall), *run.rules_at(slots, groups))
        judged = slots.write(found, judged)
    return judged.view(groups, *ids.shape).sum(dim=0)


def _with_shadows(
    run: Run, region: Region, remasked: Tensor, slots: Slots, seen: State
) -> tuple[Tensor, State]:
    """Logits at the slots, and `seen` with what stands in the same rows judged anew."""
    taken = slots.counts.high
    standing = region.at & ~remasked & remasked.any(dim=1)[:, None]
    judged = Slots.at(standing, Counts.exactly((region.sizes - taken) * (taken > 0)))
    logits, shadows = run.shadow_logits(seen.ids, remasked, standing, judged.counts.total)
    found = log_p_of(shadows, judged.read(seen.ids), *run.rules_at(judged))
    return logits, replace(seen, confidence=judged.write(found, seen.confidence))


def _slots(run: Run, stage: Stage, open_: Tensor, counts: Counts) -> Slots | None:
    """Slots for the open positions (B, T) of a pass, None without any. The device is asked how many
    they are where a row may have none, and would leave, and where none may be surplus."""
    exact = stage.refresh_every > 1 or stage.confidence == "shadow"
    if not counts.says_which_rows or (exact and not counts.is_exact):
        counts = Counts.exactly(run.ask(open_.sum(dim=1)))
    return Slots.at(open_, counts) if counts.total else None


def _draws(
    run: Run,
    stage: Stage,
    at: At,
    region: Region,
    seen: Tensor,
    open_: Tensor,
    slots: Slots,
    logits: Tensor | None = None,
) -> Draws:
    """The pass's denoiser call, unless `logits` has them, at the open positions of `seen`."""
    if logits is None and stage.refresh_every > 1:
        logits = run.kept_logits(seen, open_, full=at.index % stage.refresh_every == 0)
    if logits is None:
        logits = run.logits(seen, slots)
    temperature = _each(run, region, partial(schedule.temperature, stage, at.index)).float()
    return Draws(run, stage, logits, slots, run.uniforms("sample", at), temperature)


def _score(run: Run, stage: Stage, at: At, region: Region, open_: Tensor, sure: Sureness) -> Tensor:
    noise = _each(run, region, partial(schedule.order_noise, stage, at.index)).float()
    random = stage.order_noise > 0 or stage.order == "random"
    gumbel = _gumbel(run, at) if random else torch.zeros_like(sure.confidence)
    return order_score(stage, sure, open_, noise, gumbel)


def _each(run: Run, region: Region, number: Callable[[int], float]) -> Tensor:
    """What a schedule says of each row: (B,) int64 or float64."""
    return tell(each(region.sizes, number), run.canvas.ids.device)


def _gumbel(run: Run, at: At) -> Tensor:
    """Standard Gumbel noise (B, T) float32 on the order."""
    return -(-run.uniforms("order", at).clamp(min=1e-300).log()).log().float()


def _record(
    run: Run, stage: Stage, at: At, before: State, after: State, accepted: Tensor, remasked: Tensor
) -> Pass:
    return Pass(
        canvas=run.canvas,
        stage=at.stage,
        index=at.index,
        num_passes=stage.num_passes,
        ids=after.ids,
        confidence=after.confidence,
        accepted=accepted,
        remasked=remasked,
        previous_ids=before.ids,
        block=at.block,
    )
