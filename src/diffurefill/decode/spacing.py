"""The greedy walk with a commit gap, without walking: who is taken when none may stand too near."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def spaced(ranked: Tensor, candidates: Tensor, gap: int) -> Tensor:
    """All positions that a walk down `ranked` takes, skipping any closer than `gap` to one taken.

    ranked (B, T) int64, positions from best to worst; candidates (B, T) bool; returns (B, T) bool.
    """
    if gap == 1:
        return candidates
    B, T = ranked.shape
    countdown = torch.arange(T, 0, -1, device=ranked.device).expand(B, T)
    priority = torch.zeros_like(ranked).scatter(1, ranked, countdown) * candidates
    return _no_two_adjacent(priority) if gap == 2 else _by_rounds(priority.float(), gap)


def _no_two_adjacent(priority: Tensor) -> Tensor:
    """Gap 2, in closed form. priority (B, T) int64, distinct, 0 where nothing may be taken.

    Along the row, priorities rise and fall between peaks and valleys. A peak is taken. Down a
    slope only the higher neighbour can forbid a position, so every second one from the peak is
    taken; a valley is taken when neither of its neighbours is, so when it is an even number of
    steps from both peaks. No loop, and no wait for a device.
    """
    both_ways = torch.stack([priority, priority.flip(1)])
    falls = F.pad(both_ways[..., :-1] > both_ways[..., 1:], (1, 0))
    place = torch.arange(priority.shape[1], device=priority.device).expand_as(both_ways)
    peak = place.masked_fill(falls, 0).cummax(dim=2).values  # or where a slope begins behind a gap
    odd = (place - peak) % 2 > 0
    return (priority > 0) & ~(odd[0] | odd[1].flip(1))


def _by_rounds(priority: Tensor, gap: int) -> Tensor:
    """Wider gaps. priority (B, T) float, distinct, 0 where nothing may be taken.

    A candidate that beats every other within reach is taken whatever the walk's order elsewhere,
    so each round takes all such peaks at once; about two rounds do for scores without a trend (spec
    performance 5.5), T / gap for a slope. Asks the device once a round whether any are left.
    """
    waiting = priority > 0
    taken = torch.zeros_like(waiting)
    while waiting.any():
        contest = priority * waiting
        peaks = waiting & (contest == _window_max(contest, gap - 1))
        taken = taken | peaks
        waiting = waiting & (_window_max(peaks.float(), gap - 1) == 0)
    return taken


def _window_max(x: Tensor, reach: int) -> Tensor:
    """The maximum of x (B, T), which is nowhere negative, over positions within `reach`."""
    reach = min(reach, x.shape[1])
    return F.max_pool1d(x[:, None], kernel_size=2 * reach + 1, stride=1, padding=reach)[:, 0]


# --- runs of candidates ---------------------------------------------------------------------------


def run_ends(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """First and last position of the run of candidates each position lies in; both (B, T) int64.

    Meaningless where there is no candidate.
    """
    T = candidates.shape[1]
    place = torch.arange(T, device=candidates.device).expand_as(candidates)
    starts = candidates & ~F.pad(candidates[:, :-1], (1, 0))
    ends = candidates & ~F.pad(candidates[:, 1:], (0, 1))
    first = torch.where(starts, place, 0).cummax(dim=1).values
    last = torch.where(ends, place, T).flip(1).cummin(dim=1).values.flip(1)
    return first, last


def best_of_each_run(ranked: Tensor, candidates: Tensor) -> Tensor:
    """The candidate of each run that comes first in `ranked`: (B, T) bool."""
    T = ranked.shape[1]
    rank = torch.zeros_like(ranked).scatter(
        1, ranked, torch.arange(T, device=ranked.device).expand_as(ranked)
    )
    rank = rank.masked_fill(~candidates, T)
    first, _ = run_ends(candidates)
    best = torch.full_like(rank, T).scatter_reduce(1, first, rank, reduce="amin")
    return candidates & (rank == best.gather(1, first))
