"""Is keeping keys and values good enough for this model? Measured against exact decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffurefill.config import Stage, UserError
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.generate import generate
from diffurefill.decode.passes import regrouped
from diffurefill.decode.run import Denoiser, Run

GROUPS = 5
NATS = 0.05
"""What keeping may cost by default: about one standard error of the spec's own comparison."""


@dataclass(frozen=True)
class CacheQuality:
    """Kept against exact decoding of the same canvases with the same seeds.

    Nats are the model's own: -log p1 of the generated tokens, a fifth of them masked at a time, by
    exact passes. A sampled text that differs is not worse; a higher NLL is.
    """

    num_rows: int
    nll_exact: float
    nll_kept: float
    standard_error: float
    """Of the mean paired difference over rows; nan for a single row."""
    agreement: float
    """Share of generated tokens that are the same."""
    positions_ratio: float
    """Positions computed, kept over exact."""

    @property
    def cost(self) -> float:
        return self.nll_kept - self.nll_exact

    def check(self, max_nats: float = NATS) -> None:
        """Raises UserError unless the cost, one-sided at 95%, lies below `max_nats`."""
        worst = self.cost + 1.645 * self.standard_error
        if not worst <= max_nats:  # nan is refused too
            raise UserError(
                f"refresh_every costs {self.cost:.3f} +- {self.standard_error:.3f} nats a token on "
                f"{self.num_rows} rows, more than {max_nats:g} cannot be ruled out: lower "
                "refresh_every, measure more rows, or decode exactly (refresh_every = 1)"
            )


def measure_cache(
    denoiser: Denoiser,
    canvas: Canvas,
    stages: Sequence[Stage],
    specials: Specials,
    *,
    seeds: Sequence[int],
    block_length: int = 0,
    forbid_eos: bool = False,
) -> CacheQuality:
    """Decode `canvas` with `stages` as they are and with refresh_every 1, and compare."""
    exact_stages = [replace(stage, refresh_every=1) for stage in stages]
    results = [
        generate(
            denoiser, canvas, these, specials,
            seeds=seeds, block_length=block_length, keep_trajectory=False, forbid_eos=forbid_eos,
        )
        for these in (exact_stages, stages)
    ]  # fmt: skip
    exact, kept = results
    nll = [_nll(denoiser, canvas, specials, result.ids) for result in results]
    difference = nll[1] - nll[0]
    B, n = len(difference), int(canvas.fillable.sum())
    same = int(((exact.ids == kept.ids) & canvas.fillable).sum())
    return CacheQuality(
        num_rows=B,
        nll_exact=float(nll[0].mean()),
        nll_kept=float(nll[1].mean()),
        standard_error=float(difference.std()) / math.sqrt(B) if B > 1 else math.nan,
        agreement=same / n,
        positions_ratio=kept.num_positions / exact.num_positions,
    )


def _nll(denoiser: Denoiser, canvas: Canvas, specials: Specials, ids: Tensor) -> Tensor:
    """Mean NLL of each row's generated tokens, (B,) float64 on the CPU."""
    forbidden = (~torch.as_tensor(specials.emittable)).nonzero().squeeze(1).to(ids.device)
    run = Run(denoiser, canvas, specials, [0] * len(ids), forbidden)
    with torch.inference_mode():
        log_p = regrouped(run, canvas.fillable, ids, GROUPS).double()
    return -(log_p.sum(dim=1) / canvas.num_fillable.clamp(min=1)).cpu()
