"""The decoding loop: every stage, every pass, one denoiser call per pass.

A draft pass accepts some of what is masked; a refill pass re-masks the least sure positions and
fills them all again. Both are values of `Stage`. A row's result depends on its own canvas and seed
alone: its random numbers are keyed by (seed, stage, pass) and indexed by position.
Source: spec algorithms 5.1-5.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import DecodeConfig, Stage, UserError
from diffurefill.decode import stages as schedule
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.order import choose, order_score, ranking
from diffurefill.decode.sampling import sample, visible_neighbours
from diffurefill.runtime import philox


class Denoiser(Protocol):
    """What decoding asks of a model: logits (N, V) at the True positions of `at`, row-major."""

    def __call__(
        self, canvas: Tensor, doc_ids: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass as it ended; tensors (B, T). `canvas` is the one decoding began with."""

    canvas: Canvas
    stage: int
    index: int
    """k within the stage, from 0."""
    num_passes: int
    """The stage's; 0 where it takes as many as needed."""
    ids: Tensor
    confidence: Tensor
    accepted: Tensor
    remasked: Tensor
    """What a refill pass took back before filling it again; nowhere True in a draft."""
    previous_ids: Tensor
    """Ids before the pass, and before its re-masking."""

    @property
    def is_masked(self) -> Tensor:
        """Positions still to be filled. A fillable position holds MASK until it is written."""
        return self.canvas.fillable & (self.ids == self.canvas.ids)


@dataclass(frozen=True, eq=False)
class Generation:
    """ids (B, T) int64; confidence (B, T) float32: log p1 of each written token, 0 elsewhere."""

    ids: Tensor
    confidence: Tensor
    num_forward_passes: int
    trajectory: list[Pass]


def generate(
    denoiser: Denoiser,
    canvas: Canvas,
    stages: Sequence[Stage],
    specials: Specials,
    *,
    seeds: Sequence[int],
    on_pass: Callable[[Pass], None] | None = None,
    forbid_eos: bool = False,
) -> Generation:
    """Fill `canvas` stage by stage. `seeds` holds one number per row; `on_pass` sees each pass end.

    `denoiser` is in eval mode and on the canvas's device. K draft and R refill passes cost K + R
    calls; a pass that finds nothing masked in any row is skipped. Raises UserError for a canvas,
    seeds or stages that do not fit together, and for logits that are not finite.
    """
    stages = DecodeConfig(stages=tuple(stages)).stages
    run = _Run(denoiser, canvas, specials, _emittable(canvas, specials, forbid_eos), list(seeds))
    _check(run)
    ids, confidence = canvas.ids, torch.zeros(canvas.ids.shape, device=canvas.ids.device)
    trajectory: list[Pass] = []
    with torch.inference_mode():
        for s, stage in enumerate(stages):
            for k in schedule.pass_indices(stage):
                record = _one_pass(run, stage, s, k, ids, confidence)
                if record is None:
                    break
                ids, confidence = record.ids, record.confidence
                trajectory.append(record)
                if on_pass is not None:
                    on_pass(record)
    return Generation(ids, confidence, len(trajectory), trajectory)


def cut_at_eos(ids: Sequence[int], eos_id: int, start: int = 0) -> list[int]:
    """`ids` up to the first EOS at or after `start`, where the generated part begins."""
    ids = list(ids)
    return ids[: ids.index(eos_id, start)] if eos_id in ids[start:] else ids


@dataclass(frozen=True, eq=False)
class _Run:
    """What stays the same through all passes."""

    denoiser: Denoiser
    canvas: Canvas
    specials: Specials
    emittable: Tensor
    seeds: list[int]

    def uniforms(self, use: str, s: int, k: int) -> Tensor:
        """(B, T) float64 in [0, 1). A longer row only draws further: padding changes nothing."""
        T = self.canvas.ids.shape[1]
        rows = [philox(seed, use, s, k).random(T) for seed in self.seeds]
        return torch.from_numpy(np.stack(rows)).to(self.canvas.ids.device)


@dataclass(frozen=True, eq=False)
class _Draws:
    """One pass's logits (N, V), with what is needed to draw at any open position from any ids."""

    run: _Run
    stage: Stage
    logits: Tensor
    slot: Tensor
    """(B, T): the row of `logits` that belongs to a position."""
    uniform: Tensor
    """(B, T)"""
    temperature: Tensor
    """(B,)"""

    def at(self, where: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and confidences (M,) at the True positions of `where`, with `ids` around them."""
        doc_ids, mask_id = self.run.canvas.doc_ids, self.run.specials.mask_id
        return sample(
            self.logits,
            self.slot[where],
            visible_neighbours(ids, doc_ids, where, mask_id=mask_id),
            self.uniform[where],
            self.temperature[:, None].expand_as(ids)[where],
            emittable=self.run.emittable,
            min_p=self.stage.min_p,
            neighbour_ban=self.stage.neighbour_ban,
        )


def _one_pass(
    run: _Run, stage: Stage, s: int, k: int, ids: Tensor, confidence: Tensor
) -> Pass | None:
    """Pass k of stage s from `ids` and `confidence` (B, T); None when nothing is masked."""
    canvas, mask_id = run.canvas, run.specials.mask_id
    if stage.remask_fraction > 0:
        count = schedule.remask_count(stage, canvas.num_fillable)
        remasked = choose(-confidence, canvas.fillable, count, stage.commit_gap)
        open_ = remasked
    else:
        remasked = torch.zeros_like(canvas.fillable)
        open_ = canvas.fillable & (ids == mask_id)
    if not open_.any():
        return None
    seen = ids.masked_fill(remasked, mask_id)
    draws = _draws(run, stage, s, k, seen, open_)
    tokens, sure = draws.at(open_, seen)
    proposed = seen.masked_scatter(open_, tokens), confidence.masked_scatter(open_, sure)
    if stage.remask_fraction > 0:
        accepted, (new_ids, new_confidence) = open_, proposed
    else:
        accepted, new_ids, new_confidence = _accept(
            draws, s, k, open_, (seen, confidence), proposed
        )
    return Pass(canvas, s, k, stage.num_passes, new_ids, new_confidence, accepted, remasked, ids)


def _draws(run: _Run, stage: Stage, s: int, k: int, seen: Tensor, open_: Tensor) -> _Draws:
    """The pass's one denoiser call, at the open positions of the canvas `seen`."""
    logits = run.denoiser(seen, run.canvas.doc_ids, open_)
    if logits.shape[1] != len(run.emittable):
        raise UserError(
            f"the denoiser knows {logits.shape[1]} ids, the tokenizer {len(run.emittable)}: "
            "use the tokenizer this model was trained with"
        )
    slot = (open_.flatten().cumsum(0) - 1).view(open_.shape)
    planned = schedule.planned_passes(stage, run.canvas.num_fillable)
    temperature = schedule.temperature(stage, k, planned)
    return _Draws(run, stage, logits, slot, run.uniforms("sample", s, k), temperature)


def _accept(
    draws: _Draws,
    s: int,
    k: int,
    open_: Tensor,
    before: tuple[Tensor, Tensor],
    proposed: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept by quota, order and gap: accepted (B, T), then the new ids and confidences."""
    run, stage = draws.run, draws.stage
    num_fillable, num_masked = run.canvas.num_fillable, open_.sum(dim=1)
    noise = schedule.order_noise(stage, k, schedule.planned_passes(stage, num_fillable))
    gumbel = -(-run.uniforms("order", s, k).clamp(min=1e-300).log()).log()
    score = order_score(stage, proposed[1], noise, gumbel.float())
    quota = schedule.quota(stage, k, num_fillable, num_masked)
    accepted = choose(score, open_, quota, stage.commit_gap)
    ids, confidence = (
        torch.where(accepted, new, old) for new, old in zip(proposed, before, strict=True)
    )
    if schedule.is_last(stage, k):
        ids, confidence = _place_waived(draws, score, open_ & ~accepted, ids, confidence)
        accepted = open_
    return accepted, ids, confidence


def _place_waived(
    draws: _Draws, score: Tensor, waived: Tensor, ids: Tensor, confidence: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill what the gap kept out of the last pass, one by one in score order within each row.

    Each is drawn again, from the same logits and uniform, so that the ban sees the tokens that
    this pass has just placed beside it.
    """
    order = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    turn = torch.zeros_like(ids).scatter(1, ranking(score, waived), order)
    for j in range(int(waived.sum(dim=1).max())):
        now = waived & (turn == j)
        tokens, sure = draws.at(now, ids)
        ids, confidence = ids.masked_scatter(now, tokens), confidence.masked_scatter(now, sure)
    return ids, confidence


def _emittable(canvas: Canvas, specials: Specials, forbid_eos: bool) -> Tensor:
    """(V,) bool on the canvas's device."""
    emittable = torch.as_tensor(specials.emittable, dtype=torch.bool).clone()
    if forbid_eos:
        emittable[specials.eos_id] = False
    if not emittable.any():
        raise UserError("no id may be written: emittable is False everywhere")
    return emittable.to(canvas.ids.device)


def _check(run: _Run) -> None:
    canvas, num_rows = run.canvas, len(run.canvas.ids)
    if len(run.seeds) != num_rows:
        raise UserError(f"{len(run.seeds)} seeds for {num_rows} rows: give one seed per row")
    if not canvas.fillable.any():
        raise UserError("nothing to fill: the canvas has no fillable position")
    if not torch.equal(canvas.fillable, canvas.ids == run.specials.mask_id):
        raise UserError("a canvas must hold MASK at its fillable positions and nowhere else")
