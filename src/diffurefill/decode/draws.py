"""One pass's logits, and tokens drawn from them: at all open positions, again at the last few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.config import Stage
from diffurefill.decode.counts import Counts, least_taken
from diffurefill.decode.order import Sureness, measures, ranking
from diffurefill.decode.run import Run
from diffurefill.decode.sampling import Drawn, Places, Rules, sample
from diffurefill.decode.slots import Slots


@dataclass(frozen=True, eq=False)
class State:
    """What passes hand on."""

    ids: Tensor
    """(B, T)"""
    confidence: Tensor
    """(B, T)"""
    masked: Counts
    """Positions of each row still to be filled in this block."""
    times: Tensor
    """(B, T) int64: how often this stage has taken the position back."""
    settled: Tensor
    """(B,) bool: rows that are done with this stage."""

    @classmethod
    def start(cls, ids: Tensor, confidence: Tensor, masked: Counts) -> State:
        """As a stage begins."""
        settled = ids.new_zeros(len(ids), dtype=torch.bool)
        return cls(ids, confidence, masked, torch.zeros_like(ids), settled)


@dataclass(frozen=True, eq=False)
class Draws:
    """One pass's logits (N, V) at its N slots, with what is needed to draw there from any ids."""

    run: Run
    stage: Stage
    logits: Tensor
    slots: Slots
    uniform: Tensor
    """(B, T)"""
    temperature: Tensor
    """(B,)"""

    def draw(self, ids: Tensor, part: Slots | None = None) -> Drawn:
        """A token at each slot, or at those of `part`, with `ids` around them."""
        run, stage = self.run, self.stage
        slots, logits = self.slots, self.logits
        if part is not None:
            numbers = torch.arange(len(logits), device=ids.device)
            slots, logits = part, logits[part.read(slots.write(numbers, torch.zeros_like(ids)))]
        # Beside nothing stands the slot's own MASK.
        beside = ids.flatten()[slots.read(run.beside)] if stage.neighbour_ban > 0 else None
        places = Places(
            beside,
            slots.read(self.uniform),
            self.temperature[slots.of // ids.shape[1]],
            None if run.no_eos is None else slots.read(run.no_eos),
        )
        rules = Rules(
            run.forbidden, run.specials.eos_id, stage.min_p, stage.neighbour_ban, measures(stage)
        )
        greedy = max(stage.temperature) == 0 or (False if min(stage.temperature) > 0 else None)
        drawn = sample(logits, places, rules, greedy=greedy)
        run.note(drawn.confidence)
        return drawn


def sureness(slots: Slots, drawn: Drawn, like: Tensor) -> Sureness:
    """What was measured at the slots, at their positions of (B, T), as `like` is."""
    spread = partial(slots.write, like=torch.zeros_like(like))
    margin = None if drawn.margin is None else spread(drawn.margin)
    entropy = None if drawn.entropy is None else spread(drawn.entropy)
    return Sureness(spread(drawn.confidence), margin, entropy)


def put(state: State, slots: Slots, drawn: Drawn, where: Tensor) -> State:
    """`state` with what was drawn at the slots, kept at the True positions of `where` (B, T)."""
    ids = torch.where(where, slots.write(drawn.tokens, state.ids), state.ids)
    known = slots.write(drawn.confidence, state.confidence)
    return replace(state, ids=ids, confidence=torch.where(where, known, state.confidence))


def place_waived(draws: Draws, score: Tensor, waived: Tensor, state: State) -> State:
    """Fill what the gap kept out of the last pass, as if one by one in score order in each row.

    Each is drawn again, from the same logits and uniform, so that the ban sees the tokens that
    this pass has just placed beside it. Only neighbours see each other: all that come before their
    waiting neighbours are placed at once. Runs of waived positions are shorter than two gaps.
    """
    T, gap = waived.shape[1], draws.stage.commit_gap
    open_ = draws.slots.counts.high
    most = Counts(open_ * 0, open_ - least_taken(open_, gap))
    place = torch.arange(T, 0, -1, device=waived.device).expand_as(waived)
    turn = torch.zeros_like(state.ids).scatter(1, ranking(score, waived), place)
    for _ in range(2 * (gap - 1) if most.total else 0):
        waiting = turn * waived
        ahead = torch.maximum(F.pad(waiting[:, :-1], (1, 0)), F.pad(waiting[:, 1:], (0, 1)))
        now = waived & (waiting > ahead)
        part = Slots.at(now, most)
        state = put(state, part, draws.draw(state.ids, part), now)
        waived = waived & ~now
    return state
