"""Stages of decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from diffurefill.config.checks import require, require_not_negative

Order = Literal["confidence", "margin", "entropy", "left_to_right", "middle", "random"]
Quota = Literal["linear", "cosine", "threshold", "factor", "entropy_bound", "one_per_run"]
Confidence = Literal["stale", "regrouped", "shadow"]
BOUNDED = ("threshold", "factor", "entropy_bound")
"""Quotas that look at how sure the pass is, and want `bound`."""
ADAPTIVE = (*BOUNDED, "one_per_run")
"""Quotas whose number of passes nobody knows beforehand."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of decoding. A draft fills what is masked; a refill (`remask_fraction` above 0)
    takes back and rewrites what stands. Every decoder here is a list of these."""

    num_passes: int = 12
    """Forward passes; the last one accepts everything left. 0: a draft takes as many as its quota
    needs, a refill none."""
    remask_fraction: float = 0.0
    """0: fill what is masked, by quota. Above 0: each pass re-masks this share of the fillable
    positions, the least sure ones, and fills them all again."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """First and last pass; linear between. 0 is greedy."""
    min_p: float = 0.0
    """Drop candidates below this share of the most likely one, after temperature."""
    order: Order = "confidence"
    """Which positions come first. Of the model's distribution at temperature 1, without ban:
    `confidence` the probability of the token drawn, `margin` that of the best token less that of
    the second, `entropy` the lowest. `middle`: nearest to the middle of its run of masks. A refill
    takes back the least confident, or `random` ones (the check whether aiming matters)."""
    order_noise: float = 0.0
    """Gumbel noise on the log confidences (log margins, negative entropies) when choosing
    positions; falls linearly to 0 in the last pass."""
    quota: Quota = "linear"
    """How many a pass accepts, walking down the order. `linear`, `cosine`: how the number still
    masked falls over the passes. `threshold`: all with probability above `bound` (Fast-dLLM).
    `factor`: the i-th while (i + 1) (1 - its probability) stays within `bound` (Fast-dLLM).
    `entropy_bound`: while the sum of entropies less the largest stays within `bound` nats
    (arXiv:2505.24857). `one_per_run`: the first of every run of masks, so that runs halve and
    nothing accepted together is close (dInfer's hierarchy). All accept at least one."""
    bound: float | None = None
    """What `threshold`, `factor` and `entropy_bound` compare with; usual 0.9, 1.0 and 0.1."""
    tokens_per_pass: int | None = None
    """Accept exactly so many positions a pass instead of following `quota`."""
    commit_gap: int = 1
    """No two positions closer than this are accepted in one pass; 1 puts no constraint."""
    neighbour_ban: float = 0.0
    """Subtracted from the logit of a token already standing to the left or right."""
    confidence: Confidence = "stale"
    """What a refill knows of tokens that it has not just written. `stale`: what they were written
    with (the card). `regrouped`: before each pass all generated positions are judged anew, every
    `groups`-th one masked in a row of its own, in one call of `groups` times the rows: the model
    sees a share of masks it was trained on. `shadow`: each standing token is judged in the pass
    itself by a MASK at its position that does not see it, for twice the positions; approximate,
    since its neighbours have seen it (WINO)."""
    groups: int = 5
    """Rows that `regrouped` deals the positions to: 5 mask a fifth each."""
    remask_cap: int | None = None
    """A refill stage takes no position back more often than this, so that one which is merely hard
    to tell does not come again and again."""
    sure_above: float | None = None
    """A refill leaves tokens of this probability or more alone; a row without others is done."""
    stop_unchanged: bool = False
    """A row is done with a refill stage as soon as a pass changed none of its tokens."""
    refresh_every: int = 1
    """1: exact. n: only every n-th pass computes all positions; those between compute the open and
    the changed ones and see the others' keys and values as last computed (dKV-Cache's delay).
    Approximate: measure it on your model first (`bench cache`)."""

    @property
    def refills(self) -> bool:
        return self.remask_fraction > 0

    @property
    def is_adaptive(self) -> bool:
        return self.quota in ADAPTIVE

    def __post_init__(self) -> None:
        require(self.num_passes >= 0, "a stage's num_passes must not be negative")
        require(0.0 <= self.remask_fraction <= 1.0, "a stage's remask_fraction must lie in [0, 1]")
        require_not_negative("a stage's temperature", *self.temperature)
        require(0.0 <= self.min_p < 1.0, "a stage's min_p must lie in [0, 1)")
        require(self.commit_gap >= 1, "a stage's commit_gap must be at least 1")
        counted = 1 if self.tokens_per_pass is None else self.tokens_per_pass
        require(counted >= 1, "a stage's tokens_per_pass must be at least 1")
        require_not_negative("a stage's neighbour_ban", self.neighbour_ban)
        require_not_negative("a stage's order_noise", self.order_noise)
        require(self.refresh_every >= 1, "a stage's refresh_every must be at least 1")
        shadow = self.confidence == "shadow"
        require(not shadow or self.refresh_every == 1, "shadow confidence needs refresh_every 1")
        if self.refills:
            self._check_refill()
        else:
            self._check_draft()

    def _check_refill(self) -> None:
        plain = self.tokens_per_pass is None and self.quota == "linear" and self.bound is None
        require(plain, "a refill stage has no quota, bound or tokens_per_pass: it redoes m")
        known = self.order in ("confidence", "random")
        require(known, f"a refill takes back by confidence or random, not by {self.order}")
        require(self.order_noise == 0, "a refill has no order_noise: it takes the least sure")
        require(self.groups >= 2, "a stage's groups must be at least 2")
        cap = 1 if self.remask_cap is None else self.remask_cap
        require(cap >= 1, "a stage's remask_cap must be at least 1")
        sure = 1.0 if self.sure_above is None else self.sure_above
        require(0 < sure <= 1, "a stage's sure_above is a probability in (0, 1]")

    def _check_draft(self) -> None:
        counted = self.tokens_per_pass is not None
        needs_bound = self.quota in BOUNDED
        given = (self.confidence, self.remask_cap, self.sure_above, self.stop_unchanged)
        require(
            given == ("stale", None, None, False),
            "confidence, remask_cap, sure_above and stop_unchanged are for refills: give this "
            "stage a remask_fraction",
        )
        require(
            needs_bound == (self.bound is not None),
            f"quota {self.quota} needs a bound"
            if needs_bound
            else f"quota {self.quota} has no bound: it is for {', '.join(BOUNDED)}",
        )
        if self.quota == "threshold" and self.bound is not None:
            require(0 <= self.bound < 1, "a threshold's bound is a probability in [0, 1)")
        require((self.bound or 0) >= 0, "a stage's bound must not be negative")
        adaptive = self.is_adaptive
        require(not (adaptive and counted), f"give quota {self.quota} or tokens_per_pass, not both")
        if self.num_passes == 0:
            require(
                counted or adaptive,
                "a draft with num_passes 0 needs tokens_per_pass, or a quota out of "
                + ", ".join(ADAPTIVE),
            )
            steady = self.temperature[0] == self.temperature[1] and self.order_noise == 0
            require(
                steady or not adaptive,
                f"with quota {self.quota} give num_passes, over which temperature and order_noise "
                "fall, or one temperature and no noise",
            )
        noisy = self.order in ("confidence", "margin", "entropy")
        require(
            noisy or self.order_noise == 0, f"order {self.order} asks nobody: it has no order_noise"
        )


_APART = Stage(commit_gap=2, neighbour_ban=6.0)
DRAFT = replace(_APART, num_passes=12, temperature=(2.2, 0.9), order_noise=2.5)
REFILL = replace(_APART, num_passes=8, remask_fraction=0.2, temperature=(0.8, 0.8), min_p=0.1)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Draft and refill as the card sets them; other decoders are other stages."""

    stages: tuple[Stage, ...] = (DRAFT, REFILL)
    """The draft, then refills, in this order."""
    block_length: int = 0
    """Above 0, for long texts: fillable positions are filled in blocks of so many from left to
    right, each by all stages, those to its right still masked. 0: all at once."""

    def __post_init__(self) -> None:
        require(bool(self.stages), "decode.stages is empty")
        require(self.block_length >= 0, "decode.block_length must not be negative")
        require(
            self.stages[0].remask_fraction == 0.0,
            "the first decode stage must be a draft (remask_fraction = 0)",
        )
