"""Which positions to take: an order, a count along it, and no two closer than the commit gap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diffurefill.config import Stage
from diffurefill.decode.spacing import best_of_each_run, run_ends, spaced


@dataclass(frozen=True, eq=False)
class Sureness:
    """How sure the model is at each position, (B, T) float32; read at open positions only."""

    confidence: Tensor
    margin: Tensor | None = None
    entropy: Tensor | None = None


def measures(stage: Stage) -> tuple[str, ...]:
    """What the stage's order and quota need to know beside confidence."""
    wanted = [stage.order] if stage.order in ("margin", "entropy") else []
    if stage.quota == "entropy_bound":
        wanted.append("entropy")
    return tuple(wanted)


def order_score(
    stage: Stage, sure: Sureness, open_: Tensor, noise: Tensor, gumbel: Tensor
) -> Tensor:
    """The higher, the sooner accepted; (B, T) float32.

    open_ (B, T) bool, noise (B,) the pass's scale, gumbel (B, T) standard Gumbel draws.
    """
    T = open_.shape[1]
    place = torch.arange(T, device=open_.device).expand_as(open_)
    if stage.order == "left_to_right":
        return -place.float()
    if stage.order == "middle":
        first, last = run_ends(open_)
        return -(2 * place - first - last).abs().float()
    if stage.order == "random":
        return gumbel
    known = sure.confidence
    if stage.order == "margin" and sure.margin is not None:
        known = sure.margin
    if stage.order == "entropy" and sure.entropy is not None:
        known = -sure.entropy
    return known + noise[:, None] * gumbel if stage.order_noise > 0 else known


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
    taken = spaced(ranked, candidates, gap).gather(1, ranked)
    taken = taken & (taken.cumsum(dim=1) <= quota[:, None])
    return torch.zeros_like(candidates).scatter(1, ranked, taken)


def accept(stage: Stage, score: Tensor, open_: Tensor, quota: Tensor, sure: Sureness) -> Tensor:
    """What a draft pass accepts of the open positions, (B, T) bool: along the order, spaced by the
    gap, as many as the stage's quota says. `quota` (B,) counts where the stage counts.
    """
    if stage.quota == "threshold":
        above = open_ & (sure.confidence > math.log(max(stage.bound or 0.0, 1e-38)))
        some = above.any(dim=1)
        candidates = torch.where(some[:, None], above, open_)
        return choose(score, candidates, torch.where(some, open_.shape[1], 1), stage.commit_gap)
    if stage.quota == "one_per_run":
        best = best_of_each_run(ranking(score, open_), open_)
        return choose(score, best, quota.new_full(quota.shape, open_.shape[1]), stage.commit_gap)
    if stage.quota in ("factor", "entropy_bound"):
        return _accept_prefix(stage, score, open_, sure)
    return choose(score, open_, quota, stage.commit_gap)


def _accept_prefix(stage: Stage, score: Tensor, open_: Tensor, sure: Sureness) -> Tensor:
    """Down the spaced walk as long as the bound holds; the first is taken in any case."""
    assert stage.bound is not None  # Stage has checked
    ranked = ranking(score, open_)
    walk = spaced(ranked, open_, stage.commit_gap).gather(1, ranked)
    number = walk.cumsum(dim=1)
    if stage.quota == "factor":
        missing = 1 - sure.confidence.gather(1, ranked).exp()
        cost = (number + 1) * missing
    else:
        assert sure.entropy is not None
        entropy = sure.entropy.gather(1, ranked).masked_fill(~walk, 0.0)
        cost = entropy.cumsum(dim=1) - entropy.cummax(dim=1).values
    fails = walk & (number > 1) & (cost > stage.bound)
    taken = walk & (fails.cumsum(dim=1) == 0)
    return torch.zeros_like(open_).scatter(1, ranked, taken)
