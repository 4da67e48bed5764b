"""The decoding loop: every block, every stage, every pass. Source: spec algorithms 5.1-5.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.config import DecodeConfig, Stage, UserError
from diffurefill.decode import stages as schedule
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.counts import Counts, tell
from diffurefill.decode.draws import State
from diffurefill.decode.endings import Endings, Stop, Streamer, Streaming
from diffurefill.decode.passes import Region, draft_pass, refill_pass
from diffurefill.decode.record import Generation, Pass
from diffurefill.decode.run import At, Denoiser, Run

__all__ = ["Denoiser", "Generation", "Pass", "cut_at_eos", "generate"]


def generate(
    denoiser: Denoiser,
    canvas: Canvas,
    stages: Sequence[Stage],
    specials: Specials,
    *,
    seeds: Sequence[int],
    block_length: int = 0,
    on_pass: Callable[[Pass], None] | None = None,
    streamer: Streamer | None = None,
    keep_trajectory: bool = True,
    forbid_eos: bool = False,
    min_tokens: int = 0,
    stop_at_eos: bool = False,
    stop: Stop | None = None,
) -> Generation:
    """Fill `canvas` stage by stage. `seeds` holds one number per row; `on_pass` sees each pass end.

    `denoiser` is in eval mode and on the canvas's device. K draft and R refill passes cost K + R
    calls, R more with regrouped confidence; a pass that finds nothing to do in any row is skipped.

    block_length: above 0, fill so many positions at a time from left to right, by all stages.
    streamer: follows one row. keep_trajectory: False saves the memory of every pass.
    forbid_eos: never write EOS; min_tokens: not among the first so many fillable positions.
    stop_at_eos, stop: a row is over once its text holds EOS, or `stop` says so, with no MASK before
    that; what it still masks becomes EOS, of confidence 0. Asked after each block, and after each
    pass where nothing is refilled later. Cut the text yourself (`cut_at_eos`).

    Raises UserError for a canvas, seeds, stages or wishes that do not fit together, and, at the end
    of a block at the latest, for logits that are not finite.
    """
    config = DecodeConfig(stages=tuple(stages), block_length=block_length)
    _check(canvas, specials, len(seeds), min_tokens, streamer)
    run = Run(denoiser, canvas, specials, list(seeds), _forbidden(canvas, specials, forbid_eos))
    run.no_eos = _too_early(canvas, min_tokens)
    wanted = stop_at_eos or stop is not None
    loop = _Loop(run, config, Endings(canvas, specials, stop_at_eos, stop) if wanted else None)
    streaming = None if streamer is None else Streaming(streamer, canvas)
    trajectory: list[Pass] = []
    with torch.inference_mode():
        if streaming is not None:
            streaming.given()
        for block, region in enumerate(_blocks(run, block_length)):
            for record in loop.passes(block, region):
                if keep_trajectory:
                    trajectory.append(record)
                if on_pass is not None:
                    on_pass(record)
                if streaming is not None:
                    streaming.drafted(record.ids)
            if streaming is not None:
                streaming.settled(loop.state.ids, region.at)
        if streaming is not None:
            streaming.streamer.end()
    return Generation(
        loop.state.ids,
        loop.state.confidence,
        run.num_forward_passes,
        trajectory,
        loop.row_passes,
        run.num_positions,
    )


class _Loop:
    """The state of one run, and its passes one by one."""

    def __init__(self, run: Run, config: DecodeConfig, endings: Endings | None) -> None:
        self.run, self.config, self.endings = run, config, endings
        ids = run.canvas.ids
        confidence = torch.zeros(ids.shape, device=ids.device)
        self.state = State.start(ids, confidence, Counts.exactly(run.num_fillable))
        self.over: NDArray[np.bool_] = np.zeros(len(ids), dtype=np.bool_)
        self.row_passes = ids.new_zeros(len(ids))
        self.ended: Tensor | None = None
        """(B, T), as in Pass."""

    def passes(self, block: int, region: Region) -> Iterator[Pass]:
        """Every pass over `region`, as it ends; `state` is then up to date."""
        final = len(self.config.stages) - 1
        masked = Counts.exactly(region.sizes)
        for s, stage in enumerate(self.config.stages):
            self.state = State.start(self.state.ids, self.state.confidence, masked)
            one_pass = refill_pass if stage.refills else draft_pass
            for k in schedule.pass_indices(stage):
                at, alive = At(s, k, block), region.without(self.over)
                found = one_pass(self.run, stage, at, alive, self.state)
                if found is None:
                    break
                record, self.state = found
                self.row_passes += record.accepted.any(dim=1)
                if s == final and not stage.refills:
                    self._end_rows()
                yield replace(record, ids=self.state.ids, ended=self.ended)
            masked = self.state.masked
        self.run.check_finite()
        self._end_rows()

    def _end_rows(self) -> None:
        """Fill the rest of the rows that are over."""
        if self.endings is None:
            return
        self.over = self.over | self.endings.ended(self.state.ids)
        rows = tell(self.over, self.state.ids.device)[:, None]
        masked = (self.state.ids == self.run.specials.mask_id) & rows
        self.ended = masked if self.ended is None else self.ended | masked
        ids = self.state.ids.masked_fill(masked, self.run.specials.eos_id)
        self.state = replace(self.state, ids=ids)


def cut_at_eos(ids: Sequence[int], eos_id: int, start: int = 0) -> list[int]:
    """`ids` up to the first EOS at or after `start`, where the generated part begins."""
    ids = list(ids)
    return ids[: ids.index(eos_id, start)] if eos_id in ids[start:] else ids


def _blocks(run: Run, block_length: int) -> list[Region]:
    """The fillable positions of each block; a shorter row has none in the last ones."""
    fillable, n = run.canvas.fillable, run.num_fillable
    if block_length == 0:
        return [Region(fillable, n)]
    place = fillable.cumsum(dim=1) - 1
    return [
        Region(
            fillable & (place // block_length == j), (n - j * block_length).clip(0, block_length)
        )
        for j in range(-(-int(n.max()) // block_length))
    ]


def _too_early(canvas: Canvas, min_tokens: int) -> Tensor | None:
    """(B, T) bool: where EOS may not stand yet."""
    if min_tokens == 0:
        return None
    return canvas.fillable & (canvas.fillable.cumsum(dim=1) <= min_tokens)


def _forbidden(canvas: Canvas, specials: Specials, forbid_eos: bool) -> Tensor:
    """(F,) int64 on the canvas's device: the ids that are never written."""
    emittable = torch.as_tensor(specials.emittable, dtype=torch.bool).clone()
    if forbid_eos:
        emittable[specials.eos_id] = False
    if not emittable.any():
        raise UserError("no id may be written: emittable is False everywhere")
    return (~emittable).nonzero().squeeze(1).to(canvas.ids.device)


def _check(
    canvas: Canvas, specials: Specials, num_seeds: int, min_tokens: int, streamer: Streamer | None
) -> None:
    num_rows = len(canvas.ids)
    if num_seeds != num_rows:
        raise UserError(f"{num_seeds} seeds for {num_rows} rows: give one seed per row")
    if not canvas.fillable.any():
        raise UserError("nothing to fill: the canvas has no fillable position")
    if not torch.equal(canvas.fillable, canvas.ids == specials.mask_id):
        raise UserError("a canvas must hold MASK at its fillable positions and nowhere else")
    if min_tokens < 0:
        raise UserError(f"min_tokens must not be negative, and is {min_tokens}")
    if streamer is not None and num_rows != 1:
        raise UserError(f"a streamer follows one row, here are {num_rows}: generate one at a time")
