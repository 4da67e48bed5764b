"""The loop that workers and mergers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffurefill.config.checks import require, require_not_negative, require_positive

Codec = Literal["fp32-delta", "bf16-delta", "int8-delta", "int4-delta"]
Downlink = Literal["full", "update"]


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """The hub-synchronised loop (spec: fleet 5)."""

    local_steps: int = 150
    """H: optimiser steps between two merges."""
    min_partial_steps: int = 30
    """A session about to end pushes what it has, if it has so many steps."""

    min_fresh: int = 2
    """Contributions the merger waits for before its grace period may end the round."""
    grace_seconds: float = 150.0
    """At most so long; a round closes earlier when nobody is likely to arrive within it."""
    grace_from: Literal["nth", "first"] = "nth"
    """Grace starts at the min_fresh-th eligible arrival (report) or at the first (card)."""
    live_seconds: float = 1800.0
    """A worker whose lane has not moved for so long, on the observer's clock, is not waited for."""
    lease_seconds: float = 300.0
    """A merger silent for so long, on the observer's clock, may be replaced. Must be longer than a
    merge takes."""

    max_staleness: int = 0
    """Generations a contribution may be late and still be merged; 0 drops late ones."""
    staleness_discount: float = 0.25
    """A contribution late by s weighs tokens / (1 + staleness_discount * s)."""
    max_norm_ratio: float = 4.0
    """Reject a delta whose norm exceeds so many times the median of those accepted before;
    inf: none for its norm."""
    min_cosine: float = -0.2
    """Reject a delta whose cosine with the sum of the round's others (two or more) is below."""
    guard_rows: int = 64
    """Held-out rows on which the merger scores a new global before it publishes it; 0: no guard."""

    codec: Codec = "fp32-delta"
    """How contributions travel; int4-delta is an experiment."""
    downlink: Downlink = "full"
    """`update`: a new global is announced as an int8 step; the whole file follows later."""
    outer_step: Literal["replacement", "sgd", "nesterov", "orthogonal"] = "replacement"
    """What the merger does with the workers' mean difference: takes it whole (`replacement`), or
    as a step of SGD, Nesterov or an orthogonalised one."""
    outer_lr: float = 1.0
    """Rate of that step."""
    outer_momentum: float = 0.0
    """Momentum of `nesterov`."""
    adoption: Literal["replace", "keep_drift"] = "replace"
    """`keep_drift`: train on while waiting and add the global's change (an arm that lost)."""

    ema_decay: float = 0.9
    """What the EMA keeps of itself when a global is published: a decay by the generation, whatever
    steps or tokens went into it."""
    swa_from_step: int | None = None
    """Globals from this step on are averaged with equal weights."""
    snapshot_every: int = 0
    """Keep a copy of every so many-th generation; 0: none."""
    snapshot_keep: int = 5
    """Snapshots kept; the oldest goes first."""
    compact_every: int = 0
    """Generations between two compactions of the store; 0: only by `diffurefill compact`."""

    poll_seconds: float = 3.0
    """How often a waiting worker and the merger look at the store."""
    training_poll_seconds: float = 30.0
    """How often a worker looks for a newer global in the middle of an interval: each look keeps
    its GPU waiting, and finds something only when the worker is late."""
    log_seconds: float = 300.0
    """A waiting worker pushes its log this often, so that it is seen to be alive."""
    commits_per_hour: int = 0
    """What the store allows the whole fleet; 0: no limit. Logs and beats give way first."""

    def __post_init__(self) -> None:
        require(self.local_steps >= 1, "fleet.local_steps must be at least 1")
        require(self.min_partial_steps >= 1, "fleet.min_partial_steps must be at least 1")
        require(self.min_fresh >= 1, "fleet.min_fresh must be at least 1")
        require(0.0 <= self.ema_decay < 1.0, "fleet.ema_decay must lie in [0, 1)")
        polls = (self.poll_seconds, self.training_poll_seconds, self.log_seconds)
        require_positive("fleet times", *polls, self.live_seconds, self.lease_seconds)
        require_not_negative("fleet.grace_seconds", self.grace_seconds)
        require(self.max_norm_ratio > 1, "fleet.max_norm_ratio must be above 1")
        require(-1 <= self.min_cosine <= 1, "fleet.min_cosine must lie in [-1, 1]")
        require_positive("fleet.outer_lr", self.outer_lr)
        require(0 <= self.outer_momentum < 1, "fleet.outer_momentum must lie in [0, 1)")
        replaces, nesterov = self.outer_step == "replacement", self.outer_step == "nesterov"
        require(
            not replaces or self.outer_lr == 1.0,
            "fleet.outer_lr does nothing with replacement: set fleet.outer_step to sgd",
        )
        require(
            nesterov or self.outer_momentum == 0.0,
            "fleet.outer_momentum does nothing but with fleet.outer_step = nesterov",
        )
        require(self.snapshot_keep >= 1, "fleet.snapshot_keep must be at least 1")
        counts = (self.max_staleness, self.guard_rows, self.snapshot_every, self.compact_every)
        require(min(*counts, self.commits_per_hour) >= 0, "fleet counts must not be negative")
        require_not_negative("fleet.staleness_discount", self.staleness_discount)
