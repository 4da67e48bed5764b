"""When a round closes: pure functions of counts and of durations on the observer's own clock.

No time of another machine is ever compared. Source: spec fleet.md 5.3, 5.5, 2.4 A.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from diffurefill.config import FleetConfig

PACE_MEMORY = 5
"""Intervals of a worker that its predicted duration is the median of."""
SILENT_INTERVALS = 2.5
"""A worker silent for so many of its usual signs of life is not waited for."""


def predicted(intervals: Sequence[float]) -> float | None:
    """Seconds a worker usually takes from a global to its contribution; None if never seen."""
    return statistics.median(intervals[-PACE_MEMORY:]) if intervals else None


def live_horizon(config: FleetConfig, intervals: Sequence[float]) -> float:
    """Seconds of silence after which a worker is not waited for.

    A live worker pushes its log every `log_seconds` while it waits and at least once an interval,
    so a known pace gives an earlier verdict than `live_seconds`, which is for unknown ones.
    """
    usual = predicted(intervals)
    if usual is None:
        return config.live_seconds
    return min(config.live_seconds, SILENT_INTERVALS * max(usual, config.log_seconds))


def num_needed(config: FleetConfig, num_live: int, *, recovering: bool) -> int:
    """Contributions without which the round stays open.

    `min_fresh`, but never more than there are live workers: N falls to 1 when one worker is left.
    A merger that has just started needs one: after the loss of a whole fleet, what dead workers
    had pushed is merged before any new worker is waited for (the report's rule ii).
    """
    return 1 if recovering else max(1, min(config.min_fresh, num_live))


def grace_opens(config: FleetConfig, num_eligible: int, needed: int) -> bool:
    """Whether the grace period for stragglers has begun."""
    return num_eligible >= (needed if config.grace_from == "nth" else 1)


def round_closes(
    config: FleetConfig,
    *,
    num_eligible: int,
    needed: int,
    missing: Sequence[float | None],
    grace_elapsed: float,
) -> bool:
    """Whether to average now: enough contributions, and nobody left that is worth waiting for.

    `missing` has an entry for every live worker that has not reported: the seconds until it is
    predicted to, or None. The grace period ends early when all of them are predicted to arrive
    after its end; a worker that is overdue may arrive at any moment.
    """
    if num_eligible < needed:
        return False
    left = config.grace_seconds - grace_elapsed
    if not missing or left <= 0:
        return True
    return all(seconds is not None and seconds > left for seconds in missing)
