"""From logits to one token per open position: neighbour ban, temperature, min-p, inverse CDF.

The order of operations is that of spec algorithms 5.1. A token is drawn by inverting the CDF with
one float64 uniform per position (spec performance 7): Gumbel noise in low precision would sample
from a colder distribution than the one asked for, and would need V draws instead of one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.config import UserError

CDF_BLOCK = 160
"""Width of the blocks of the two-level CDF: 461 of them for a vocabulary of 73,760."""
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits worked on at a time, by device: what stays in a core's cache, or few launches and
temporaries of 64 MiB, however many positions are open."""


def visible_neighbours(ids: Tensor, doc_ids: Tensor, at: Tensor, *, mask_id: int) -> Tensor:
    """The tokens standing left and right of each True of `at` (B, T): (N, 2) int64, -1 for none.

    MASK, another document's tokens and padding (doc id -1) are no neighbours. A token standing on
    both sides is named once, so that it is charged once.
    """
    visible = ids.masked_fill(ids == mask_id, -1)
    same = (doc_ids[:, 1:] == doc_ids[:, :-1]) & (doc_ids[:, 1:] >= 0)
    left = F.pad(torch.where(same, visible[:, :-1], -1), (1, 0), value=-1)[at]
    right = F.pad(torch.where(same, visible[:, 1:], -1), (0, 1), value=-1)[at]
    return torch.stack([left, torch.where(right == left, -1, right)], dim=1)


def candidate_logits(
    logits: Tensor, neighbours: Tensor, temperature: Tensor, *, min_p: float, neighbour_ban: float
) -> Tensor:
    """Steps 3-5: ban, temperature, min-p. The largest of each row is 0; -inf is never drawn.

    logits (N, V) float32, -inf where an id must not be written; neighbours (N, 2), -1 for none;
    temperature (N,), where 0 (greedy) leaves the scale alone.
    """
    charge = torch.where(neighbours >= 0, -neighbour_ban, 0.0)
    logits = logits.scatter_add(1, neighbours.clamp(min=0), charge)
    # The maximum is taken off first: a tiny temperature then sends the rest to -inf, never to nan.
    logits -= logits.amax(dim=1, keepdim=True)
    logits /= torch.where(temperature > 0, temperature, 1.0)[:, None]
    return logits.masked_fill_(logits < math.log(min_p), -math.inf) if min_p > 0 else logits


def inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """One id per row from softmax(logits): the first whose cumulative probability exceeds u.

    logits (N, V) float32; uniform (N,) float64 in [0, 1). Cumulative sums are float64, first over
    blocks of the vocabulary, then inside the block that was hit. Returns (N,) int64.
    """
    N, V = logits.shape
    blocks = F.pad(logits.softmax(dim=1), (0, -V % CDF_BLOCK)).view(N, -1, CDF_BLOCK)
    cdf = blocks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target = uniform * cdf[:, -1]
    block = _first_above(cdf, target)
    before = F.pad(cdf, (1, 0)).gather(1, block[:, None])[:, 0]
    inside = blocks[torch.arange(N, device=block.device), block].double().cumsum(dim=1)
    return block * CDF_BLOCK + _first_above(inside, target - before)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry of each row of `cdf` above `target`: never one of probability 0.

    Rounding can lift the target to the total; it is held just below, where the last id of positive
    probability answers.
    """
    total = cdf[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cdf, torch.minimum(target, below)[:, None], right=True)[:, 0]


def sample(
    logits: Tensor,
    slot: Tensor,
    neighbours: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    *,
    emittable: Tensor,
    min_p: float,
    neighbour_ban: float,
) -> tuple[Tensor, Tensor]:
    """One token and its confidence for each of N positions: ids (N,) int64, log p1 (N,) float32.

    logits (M, V) of any dtype, slot (N,) their row for each position; emittable (V,) bool. log p1
    is the log-softmax over emittable ids at temperature 1, before ban and truncation: how sure the
    model is, not how the token was drawn. Raises UserError for nan or inf.
    """
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    tokens, confidence = [], []
    for start in range(0, len(slot), size):
        part = slice(start, start + size)
        clean = logits[slot[part]].float().masked_fill_(~emittable, -math.inf)  # indexing copies
        if not clean.amax(dim=1).isfinite().all():
            raise UserError("the denoiser gave logits that are not finite: use other weights")
        scaled = candidate_logits(
            clean, neighbours[part], temperature[part], min_p=min_p, neighbour_ban=neighbour_ban
        )
        greedy = temperature[part] == 0
        if greedy.all():
            drawn = scaled.argmax(dim=1)
        else:
            drawn = inverse_cdf(scaled, uniform[part])
            if greedy.any():
                drawn = torch.where(greedy, scaled.argmax(dim=1), drawn)
        tokens.append(drawn)
        confidence.append(clean.log_softmax(dim=1).gather(1, drawn[:, None])[:, 0])
    return torch.cat(tokens), torch.cat(confidence)
