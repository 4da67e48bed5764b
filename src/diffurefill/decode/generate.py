"""The decoding loop: every block, every stage, every pass. Source: spec algorithms 5.1-5.5."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diffurefill.config import DecodeConfig, Stage, UserError
from diffurefill.decode import stages as schedule
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.passes import At, Denoiser, Run, State, draft_pass, refill_pass
from diffurefill.decode.record import Generation, Pass

__all__ = ["Denoiser", "Generation", "Pass", "cut_at_eos", "generate"]


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
    _check(canvas, specials, len(seeds))
    run = Run(denoiser, canvas, specials, list(seeds), _forbidden(canvas, specials, forbid_eos))
    state = State(canvas.ids, torch.zeros(canvas.ids.shape, device=canvas.ids.device))
    trajectory: list[Pass] = []
    with torch.inference_mode():
        for s, stage in enumerate(stages):
            one_pass = refill_pass if stage.refills else draft_pass
            for k in schedule.pass_indices(stage):
                record = one_pass(run, stage, At(s, k), canvas.fillable, state)
                if record is None:
                    break
                state = State(record.ids, record.confidence)
                trajectory.append(record)
                if on_pass is not None:
                    on_pass(record)
    return Generation(
        state.ids, state.confidence, run.num_forward_passes, trajectory, run.num_row_passes
    )


def cut_at_eos(ids: Sequence[int], eos_id: int, start: int = 0) -> list[int]:
    """`ids` up to the first EOS at or after `start`, where the generated part begins."""
    ids = list(ids)
    return ids[: ids.index(eos_id, start)] if eos_id in ids[start:] else ids


def _forbidden(canvas: Canvas, specials: Specials, forbid_eos: bool) -> Tensor:
    """(F,) int64 on the canvas's device: the ids that are never written."""
    emittable = torch.as_tensor(specials.emittable, dtype=torch.bool).clone()
    if forbid_eos:
        emittable[specials.eos_id] = False
    if not emittable.any():
        raise UserError("no id may be written: emittable is False everywhere")
    return (~emittable).nonzero().squeeze(1).to(canvas.ids.device)


def _check(canvas: Canvas, specials: Specials, num_seeds: int) -> None:
    num_rows = len(canvas.ids)
    if num_seeds != num_rows:
        raise UserError(f"{num_seeds} seeds for {num_rows} rows: give one seed per row")
    if not canvas.fillable.any():
        raise UserError("nothing to fill: the canvas has no fillable position")
    if not torch.equal(canvas.fillable, canvas.ids == specials.mask_id):
        raise UserError("a canvas must hold MASK at its fillable positions and nowhere else")
