"""One pass: mask, one denoiser call at the open positions, a token for each, accept some or all.

A draft pass accepts some of what is masked; a refill pass re-masks the least sure positions and
fills them all again. A row's result depends on its own canvas and seed alone: its random numbers
are keyed by (seed, stage, pass, block) and indexed by position. Source: spec algorithms 5.1-5.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.config import Stage, UserError
from diffurefill.decode import stages as schedule
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.order import Sureness, accept, choose, measures, order_score, ranking
from diffurefill.decode.record import Pass
from diffurefill.decode.sampling import (
    Drawn,
    Places,
    Rules,
    log_p_of,
    sample,
    visible_neighbours,
)
from diffurefill.model.cached import RowCache, shadow_logits
from diffurefill.runtime import philox


class Denoiser(Protocol):
    """What decoding asks of a model: logits (N, V) at the True positions of `at`, row-major."""

    def __call__(
        self, canvas: Tensor, doc_ids: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor: ...


@dataclass(eq=False)
class Run:
    """What stays the same through all passes, and what they cost."""

    denoiser: Denoiser
    canvas: Canvas
    specials: Specials
    seeds: list[int]
    forbidden: Tensor
    """(F,) int64: ids that are never written."""
    no_eos: Tensor | None = None
    """(B, T) bool: where EOS is forbidden too."""
    num_forward_passes: int = 0
    num_positions: int = 0
    cache: RowCache | None = None
    """Keys and values of the stage's last passes, where it keeps them."""

    def uniforms(self, use: str, at: At) -> Tensor:
        """(B, T) float64 in [0, 1). A longer row only draws further: padding changes nothing."""
        T = self.canvas.ids.shape[1]
        block = ("block", at.block) if at.block else ()
        rows = [philox(seed, use, at.stage, at.index, *block).random(T) for seed in self.seeds]
        return torch.from_numpy(np.stack(rows)).to(self.canvas.ids.device)

    def logits(self, seen: Tensor, at: Tensor) -> Tensor:
        """The denoiser's logits (N, V) at the True positions of `at`, N > 0, row-major.

        seen and at: (B, T), or whole batches of that one below the other. Rows without an open
        position are left out of the call, and columns that only they reach.
        """
        rows = at.any(dim=1)
        doc_ids = self.canvas.doc_ids
        doc_ids = doc_ids.repeat(len(seen) // len(doc_ids), 1)
        if not rows.all():
            seen, doc_ids, at = seen[rows], doc_ids[rows], at[rows]
            width = int((doc_ids >= 0).any(dim=0).sum())
            seen, doc_ids, at = seen[:, :width], doc_ids[:, :width], at[:, :width]
        return self._counted(self.denoiser(seen, doc_ids, at), seen.numel())

    def rules_at(self, at: Tensor) -> tuple[Rules, Tensor | None]:
        """What may be written at the True positions of `at` (k * B, T): for `log_p_of`."""
        no_eos = self.no_eos
        if no_eos is not None:
            no_eos = no_eos.repeat(len(at) // len(no_eos), 1)[at]
        return Rules(self.forbidden, self.specials.eos_id), no_eos

    def kept_logits(self, seen: Tensor, open_: Tensor, *, full: bool) -> Tensor:
        """As `logits`, with keys and values of the passes before for what has not changed."""
        if self.cache is None or full:
            self.cache = RowCache(self.denoiser)
        return self._counted(*self.cache.logits(seen, self.canvas.doc_ids, open_, full=full))

    def shadow_logits(self, seen: Tensor, open_: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at the open positions, and of the shadows of the `judged` ones; all (B, T)."""
        num_positions = seen.numel() + int(judged.sum())
        logits, shadows = shadow_logits(
            self.denoiser, seen, self.canvas.doc_ids, open_, judged, self.specials.mask_id
        )
        return self._counted(logits, num_positions), shadows

    def _counted(self, logits: Tensor, num_positions: int) -> Tensor:
        self.num_forward_passes += 1
        self.num_positions += num_positions
        if logits.shape[1] != self.specials.vocab_size:
            raise UserError(
                f"the denoiser knows {logits.shape[1]} ids, the tokenizer "
                f"{self.specials.vocab_size}: use the tokenizer this model was trained with"
            )
        return logits


@dataclass(frozen=True)
class At:
    """Where in the plan a pass stands."""

    stage: int
    index: int
    block: int = 0


@dataclass(frozen=True, eq=False)
class State:
    """What passes hand on."""

    ids: Tensor
    """(B, T)"""
    confidence: Tensor
    """(B, T)"""
    times: Tensor
    """(B, T) int64: how often this stage has taken the position back."""
    settled: Tensor
    """(B,) bool: rows that are done with this stage."""

    @classmethod
    def start(cls, ids: Tensor, confidence: Tensor) -> State:
        """As a stage begins."""
        return cls(
            ids, confidence, torch.zeros_like(ids), ids.new_zeros(len(ids), dtype=torch.bool)
        )


@dataclass(frozen=True, eq=False)
class _Draws:
    """One pass's logits (N, V), with what is needed to draw at any open position from any ids."""

    run: Run
    stage: Stage
    logits: Tensor
    slots: Tensor
    """(N,) of B * T: the position that a row of `logits` belongs to."""
    uniform: Tensor
    """(B, T)"""
    temperature: Tensor
    """(B,)"""

    def draw(self, ids: Tensor, which: Tensor | None = None) -> Drawn:
        """A token at each slot, or at those of `which` (M,) of N, with `ids` around them."""
        run, stage = self.run, self.stage
        slots = self.slots if which is None else self.slots[which]
        logits = self.logits if which is None else self.logits[which]
        beside = visible_neighbours(ids, run.canvas.doc_ids, mask_id=run.specials.mask_id)
        places = Places(
            beside.view(-1, 2)[slots],
            self.uniform.view(-1)[slots],
            self.temperature[slots // ids.shape[1]],
            None if run.no_eos is None else run.no_eos.view(-1)[slots],
        )
        rules = Rules(
            run.forbidden, run.specials.eos_id, stage.min_p, stage.neighbour_ban, measures(stage)
        )
        greedy = max(stage.temperature) == 0 or (False if min(stage.temperature) > 0 else None)
        drawn = sample(logits, places, rules, greedy=greedy)
        if not drawn.confidence.isfinite().all():
            raise UserError("the denoiser gave logits that are not finite: use other weights")
        return drawn


def draft_pass(
    run: Run, stage: Stage, at: At, region: Tensor, state: State
) -> tuple[Pass, State] | None:
    """Fill some of what is masked in `region` (B, T); None when nothing is."""
    open_ = region & (state.ids == run.specials.mask_id)
    draws = _draws(run, stage, at, region, state.ids, open_)
    if draws is None:
        return None
    drawn = draws.draw(state.ids)
    sure = _sureness(draws.slots, drawn, state.confidence)
    score = _score(run, stage, at, region, open_, sure)
    num_fillable, num_masked = region.sum(dim=1), open_.sum(dim=1)
    quota = schedule.quota(stage, at.index, num_fillable, num_masked)
    if schedule.is_last(stage, at.index):
        accepted = choose(score, open_, quota, stage.commit_gap)
    else:
        accepted = accept(stage, score, open_, quota, sure)
    after = _put(state, draws.slots, drawn, accepted)
    if schedule.is_last(stage, at.index):
        after = _place_waived(draws, score, open_ & ~accepted, after)
        accepted = open_
    return _record(run, stage, at, state, after, accepted, torch.zeros_like(open_)), after


def refill_pass(
    run: Run, stage: Stage, at: At, region: Tensor, state: State
) -> tuple[Pass, State] | None:
    """Take back the least sure of `region` (B, T) and fill them again; None when none may be."""
    knows = state
    if stage.confidence == "regrouped":
        asked = region & ~state.settled[:, None]
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
    seen = replace(knows, ids=state.ids.masked_fill(remasked, run.specials.mask_id))
    draws = None
    if stage.confidence == "shadow" and bool(remasked.any()):
        standing = region & ~remasked & active[:, None]
        logits, shadows = run.shadow_logits(seen.ids, remasked, standing)
        judged = log_p_of(shadows, seen.ids[standing], *run.rules_at(standing))
        seen = replace(seen, confidence=seen.confidence.masked_scatter(standing, judged))
        draws = _draws(run, stage, at, region, seen.ids, remasked, logits)
    else:
        draws = _draws(run, stage, at, region, seen.ids, remasked)
    if draws is None:
        return None
    after = _put(seen, draws.slots, draws.draw(seen.ids), remasked)
    changed = (after.ids != state.ids).any(dim=1)
    unchanged = ~changed if stage.stop_unchanged else torch.zeros_like(changed)
    after = replace(after, times=state.times + remasked.long(), settled=seen.settled | unchanged)
    return _record(run, stage, at, state, after, remasked, remasked), after


def _to_remask(run: Run, stage: Stage, at: At, region: Tensor, state: State) -> Tensor:
    """What a refill pass takes back, (B, T) bool."""
    candidates = region & ~state.settled[:, None]
    if stage.remask_cap is not None:
        candidates = candidates & (state.times < stage.remask_cap)
    if stage.sure_above is not None:
        candidates = candidates & (state.confidence < math.log(stage.sure_above))
    count = schedule.remask_count(stage, region.sum(dim=1))
    score = _gumbel(run, at) if stage.order == "random" else -state.confidence
    return choose(score, candidates, count, stage.commit_gap)


def regrouped(run: Run, region: Tensor, ids: Tensor, groups: int) -> Tensor:
    """log p1 of the tokens standing in `region` (B, T), each judged from under a MASK; else 0.

    Positions are dealt out in turn; a group is masked together in a row of its own, all rows in
    one call. Nothing is approximate but that a token's group is hidden with it.
    """
    if not region.any():
        return torch.zeros(ids.shape, device=ids.device)
    turn = (region.cumsum(dim=1) - 1) % groups
    at = torch.cat([region & (turn == g) for g in range(groups)])  # (groups * B, T)
    tall = ids.repeat(groups, 1)
    logits = run.logits(tall.masked_fill(at, run.specials.mask_id), at)
    found = log_p_of(logits, tall[at], *run.rules_at(at))
    judged = torch.zeros(at.shape, device=ids.device).masked_scatter_(at, found)
    return judged.view(groups, *ids.shape).sum(dim=0)


def _draws(
    run: Run,
    stage: Stage,
    at: At,
    region: Tensor,
    seen: Tensor,
    open_: Tensor,
    logits: Tensor | None = None,
) -> _Draws | None:
    """The pass's denoiser call, unless `logits` has them, at the open positions of the canvas
    `seen`; None without any."""
    slots = open_.flatten().nonzero().squeeze(1)
    if len(slots) == 0:
        return None
    if logits is None:
        kept, full = stage.refresh_every > 1, at.index % stage.refresh_every == 0
        logits = run.kept_logits(seen, open_, full=full) if kept else run.logits(seen, open_)
    planned = schedule.planned_passes(stage, region.sum(dim=1))
    temperature = schedule.temperature(stage, at.index, planned)
    return _Draws(run, stage, logits, slots, run.uniforms("sample", at), temperature)


def _score(run: Run, stage: Stage, at: At, region: Tensor, open_: Tensor, sure: Sureness) -> Tensor:
    noise = schedule.order_noise(stage, at.index, schedule.planned_passes(stage, region.sum(dim=1)))
    random = stage.order_noise > 0 or stage.order == "random"
    gumbel = _gumbel(run, at) if random else torch.zeros_like(sure.confidence)
    return order_score(stage, sure, open_, noise, gumbel)


def _gumbel(run: Run, at: At) -> Tensor:
    """Standard Gumbel noise (B, T) float32 on the order."""
    return -(-run.uniforms("order", at).clamp(min=1e-300).log()).log().float()


def _sureness(slots: Tensor, drawn: Drawn, like: Tensor) -> Sureness:
    """What was measured at the slots, at their positions of (B, T)."""

    def spread(values: Tensor) -> Tensor:
        return torch.zeros_like(like).view(-1).index_copy_(0, slots, values).view_as(like)

    margin = None if drawn.margin is None else spread(drawn.margin)
    entropy = None if drawn.entropy is None else spread(drawn.entropy)
    return Sureness(spread(drawn.confidence), margin, entropy)


def _put(state: State, slots: Tensor, drawn: Drawn, where: Tensor) -> State:
    """`state` with what was drawn at the slots, kept at the True positions of `where` (B, T)."""
    ids = state.ids.flatten().index_copy(0, slots, drawn.tokens).view_as(where)
    confidence = state.confidence.flatten().index_copy(0, slots, drawn.confidence).view_as(where)
    return replace(
        state,
        ids=torch.where(where, ids, state.ids),
        confidence=torch.where(where, confidence, state.confidence),
    )


def _place_waived(draws: _Draws, score: Tensor, waived: Tensor, state: State) -> State:
    """Fill what the gap kept out of the last pass, as if one by one in score order in each row.

    Each is drawn again, from the same logits and uniform, so that the ban sees the tokens that
    this pass has just placed beside it. Only neighbours see each other: all that come before their
    waiting neighbours are placed at once. Runs of waived positions are shorter than two gaps.
    """
    T = waived.shape[1]
    place = torch.arange(T, 0, -1, device=waived.device).expand_as(waived)
    turn = torch.zeros_like(state.ids).scatter(1, ranking(score, waived), place)
    for _ in range(2 * (draws.stage.commit_gap - 1)):
        waiting = turn * waived
        ahead = torch.maximum(F.pad(waiting[:, :-1], (1, 0)), F.pad(waiting[:, 1:], (0, 1)))
        now = waived & (waiting > ahead)
        which = now.flatten()[draws.slots].nonzero().squeeze(1)
        if len(which) == 0:
            break
        state = _put(state, draws.slots[which], draws.draw(state.ids, which), now)
        waived = waived & ~now
    return state


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
