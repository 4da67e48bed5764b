"""Which positions to take: the best by score, no two closer than the commit gap."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.config import Stage


def order_score(stage: Stage, confidence: Tensor, noise: Tensor, gumbel: Tensor) -> Tensor:
    """The higher, the sooner accepted; (B, T) float32.

    confidence (B, T) log p1, noise (B,) the pass's scale, gumbel (B, T) standard Gumbel draws.
    Left to right looks at the position alone.
    """
    if stage.order == "left_to_right":
        T = confidence.shape[1]
        return -torch.arange(T, device=confidence.device).float().expand_as(confidence)
    return confidence + noise[:, None] * gumbel


def ranking(score: Tensor, candidates: Tensor) -> Tensor:
    """Positions of each row from best to worst, ties by position, others last: (B, T) int64."""
    return (
        score.masked_fill(~candidates, -math.inf).sort(dim=1, descending=True, stable=True).indices
    )


def choose(score: Tensor, candidates: Tensor, quota: Tensor, gap: int) -> Tensor:
    """The first `quota` (B,) positions of a greedy walk down the scores that skips any position
    closer than `gap` to one already taken: (B, T) bool. Fewer where the gap leaves no more.
    """
    ranked = ranking(score, candidates)
    taken = _spaced(ranked, candidates, gap) if gap > 1 else candidates
    taken = taken.gather(1, ranked)
    taken = taken & (taken.cumsum(dim=1) <= quota[:, None])
    return torch.zeros_like(candidates).scatter(1, ranked, taken)


def _spaced(ranked: Tensor, candidates: Tensor, gap: int) -> Tensor:
    """All positions the greedy walk takes, (B, T) bool.

    A candidate that beats every other within reach is taken whatever the walk's order elsewhere,
    so each round takes all such peaks at once; about two rounds do (spec performance 5.5).
    """
    B, T = ranked.shape
    countdown = torch.arange(T, 0, -1, device=ranked.device).float().expand(B, T)
    priority = torch.zeros_like(countdown).scatter(1, ranked, countdown)
    waiting, taken = candidates, torch.zeros_like(candidates)
    while waiting.any():
        contest = priority.masked_fill(~waiting, 0.0)
        peaks = waiting & (contest == _window_max(contest, gap - 1))
        taken = taken | peaks
        waiting = waiting & (_window_max(peaks.float(), gap - 1) == 0)
    return taken


def _window_max(x: Tensor, reach: int) -> Tensor:
    """The maximum of x (B, T), which is nowhere negative, over positions within `reach`."""
    reach = min(reach, x.shape[1])
    return F.max_pool1d(x[:, None], kernel_size=2 * reach + 1, stride=1, padding=reach)[:, 0]
