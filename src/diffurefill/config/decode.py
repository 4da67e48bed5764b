"""Stages of decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from diffurefill.config.checks import require


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of decoding: draft, refill, left-to-right and n-per-pass are values of this."""

    num_passes: int = 12
    """Forward passes. 0: a draft takes as many as `tokens_per_pass` needs, a refill none."""
    remask_fraction: float = 0.0
    """0: fill what is masked, by quota. Above 0: each pass re-masks this share of the fillable
    positions, the least sure ones, and fills them all again."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """First and last pass; linear between. 0 is greedy."""
    min_p: float = 0.0
    """Drop candidates below this share of the most likely one, after temperature."""
    order: Literal["confidence", "left_to_right"] = "confidence"
    order_noise: float = 0.0
    """Gumbel noise on the log confidences when choosing positions; 0 in the last pass."""
    quota: Literal["linear", "cosine"] = "linear"
    """How the number still masked falls over the passes."""
    tokens_per_pass: int | None = None
    """Accept exactly so many positions a pass instead of following `quota`."""
    commit_gap: int = 1
    """No two positions closer than this are accepted in one pass; 1 puts no constraint."""
    neighbour_ban: float = 0.0
    """Subtracted from the logit of a token already standing to the left or right."""

    def __post_init__(self) -> None:
        require(self.num_passes >= 0, "a stage's num_passes must not be negative")
        require(0.0 <= self.remask_fraction <= 1.0, "a stage's remask_fraction must lie in [0, 1]")
        require(min(self.temperature) >= 0.0, "a stage's temperature must not be negative")
        require(0.0 <= self.min_p < 1.0, "a stage's min_p must lie in [0, 1)")
        require(self.commit_gap >= 1, "a stage's commit_gap must be at least 1")
        counted, refills = self.tokens_per_pass is not None, self.remask_fraction > 0
        require((self.tokens_per_pass or 1) >= 1, "a stage's tokens_per_pass must be at least 1")
        endless = self.num_passes == 0 and not refills
        require(counted or not endless, "a draft with num_passes 0 needs tokens_per_pass")
        require(not (refills and counted), "a refill stage has no tokens_per_pass: it redoes m")


_APART = Stage(commit_gap=2, neighbour_ban=6.0)
DRAFT = replace(_APART, num_passes=12, temperature=(2.2, 0.9), order_noise=2.5)
REFILL = replace(_APART, num_passes=8, remask_fraction=0.2, temperature=(0.8, 0.8), min_p=0.1)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Draft and refill as the card sets them; other decoders are other stages."""

    stages: tuple[Stage, ...] = (DRAFT, REFILL)

    def __post_init__(self) -> None:
        require(bool(self.stages), "decode.stages is empty")
        require(
            self.stages[0].remask_fraction == 0.0,
            "the first decode stage must be a draft (remask_fraction = 0)",
        )
