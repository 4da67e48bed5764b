"""From logits to one token per open position: neighbour ban, temperature, min-p, inverse CDF.

The order of operations is that of spec algorithms 5.1. A token is drawn by inverting the CDF with
one float64 uniform per position (spec performance 7): Gumbel noise in low precision would sample
from a colder distribution than the one asked for, and would need V draws instead of one.
Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CDF_BLOCK = 160
"""Width of the blocks of the two-level CDF: 461 of them for a vocabulary of 73,760."""
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits worked on at a time, by device: what stays in a core's cache, or few launches and
temporaries of 64 MiB, however many positions are open."""
COLDEST = 1e-30
"""Temperatures above 0 are held above this, so that their inverse is a number."""


@dataclass(frozen=True, eq=False)
class Rules:
    """How tokens are drawn. `measures`: which of `margin` and `entropy` are wanted beside."""

    forbidden: Tensor
    """(F,) int64: ids that are never written; confidences do not count them."""
    eos_id: int
    min_p: float = 0.0
    neighbour_ban: float = 0.0
    measures: tuple[str, ...] = ()


class Places(NamedTuple):
    """What a draw must know of its N positions."""

    neighbours: Tensor
    """(N, 2) int64: tokens standing beside, -1 for none."""
    uniform: Tensor
    """(N,) float64 in [0, 1)."""
    temperature: Tensor
    """(N,) float32; 0 is greedy."""
    no_eos: Tensor | None = None
    """(N,) bool: where EOS is forbidden too; None where nowhere."""

    def part(self, which: slice) -> Places:
        no_eos = None if self.no_eos is None else self.no_eos[which]
        return Places(self.neighbours[which], self.uniform[which], self.temperature[which], no_eos)


class Drawn(NamedTuple):
    """One token for each of N positions, and how sure the model is, however the token was drawn:
    all of the softmax at temperature 1 over what may be written, before ban and truncation."""

    tokens: Tensor
    confidence: Tensor
    """log p1 of the token."""
    margin: Tensor | None = None
    """log of (the best probability - the second)."""
    entropy: Tensor | None = None
    """In nats."""


def visible_neighbours(ids: Tensor, doc_ids: Tensor, *, mask_id: int) -> Tensor:
    """The tokens standing left and right of every position: (B, T, 2) int64, -1 for none.

    MASK, another document's tokens and padding (doc id -1) are no neighbours. A token standing on
    both sides is named once, so that it is charged once.
    """
    visible = ids.masked_fill(ids == mask_id, -1)
    same = (doc_ids[:, 1:] == doc_ids[:, :-1]) & (doc_ids[:, 1:] >= 0)
    left = F.pad(torch.where(same, visible[:, :-1], -1), (1, 0), value=-1)
    right = F.pad(torch.where(same, visible[:, 1:], -1), (0, 1), value=-1)
    return torch.stack([left, torch.where(right == left, -1, right)], dim=2)


def sample(logits: Tensor, places: Places, rules: Rules, *, greedy: bool | None = None) -> Drawn:
    """One token for each row of logits (N, V), of any dtype; they are left as they are.

    greedy: True or False where the caller knows that all or none of the temperatures are 0.
    A row with a logit that is nan or +inf, or with nothing but -inf, has confidence nan.
    """
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    parts = []
    for start in range(0, max(len(logits), 1), size):
        which = slice(start, start + size)
        parts.append(_sample_part(logits[which], places.part(which), rules, greedy))
    if len(parts) == 1:
        return parts[0]
    tokens, confidence, margin, entropy = zip(*parts, strict=True)
    return Drawn(torch.cat(tokens), torch.cat(confidence), _joined(margin), _joined(entropy))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def log_p_of(logits: Tensor, tokens: Tensor, rules: Rules, no_eos: Tensor | None = None) -> Tensor:
    """log p1 of given tokens (N,) under logits (N, V); -inf for one that may not be written."""
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    found = []
    for start in range(0, max(len(logits), 1), size):
        which = slice(start, start + size)
        log_p = _log_p(logits[which], rules, None if no_eos is None else no_eos[which])
        found.append(log_p.gather(1, tokens[which, None])[:, 0])
    return torch.cat(found)


def _log_p(logits: Tensor, rules: Rules, no_eos: Tensor | None) -> Tensor:
    """Log-softmax (N, V) float32 over what may be written."""
    clean = logits.float() if logits.dtype != torch.float32 else logits.clone()
    clean.index_fill_(1, rules.forbidden, -torch.inf)
    if no_eos is not None:
        clean[:, rules.eos_id].masked_fill_(no_eos, -torch.inf)
    return clean.log_softmax(dim=1)


def _sample_part(logits: Tensor, places: Places, rules: Rules, greedy: bool | None) -> Drawn:
    log_p = _log_p(logits, rules, places.no_eos)
    scaled = scaled_logits(log_p, places.neighbours, places.temperature, rules.neighbour_ban)
    if greedy:
        tokens = scaled.argmax(dim=1)
    else:
        tokens = inverse_cdf(weights(scaled, rules.min_p), places.uniform)
        if greedy is None:
            tokens = torch.where(places.temperature == 0, scaled.argmax(dim=1), tokens)
    confidence = log_p.gather(1, tokens[:, None])[:, 0]
    return Drawn(tokens, confidence, *_measures(log_p, rules.measures))


def _measures(log_p: Tensor, wanted: tuple[str, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Margin and entropy, each (N,) where wanted."""
    margin = entropy = None
    if "margin" in wanted:
        best = log_p.topk(min(2, log_p.shape[1]), dim=1).values.exp()
        gap = best[:, 0] - best[:, 1] if best.shape[1] == 2 else best[:, 0]
        margin = gap.clamp(min=1e-38).log()
    if "entropy" in wanted:
        entropy = torch.special.entr(log_p.exp()).sum(dim=1)
    return margin, entropy


def scaled_logits(log_p: Tensor, neighbours: Tensor, temperature: Tensor, ban: float) -> Tensor:
    """Steps 3 and 4, ban and temperature, of log_p (N, V): (N, V), a new tensor.

    Where temperature (N,) is 0 the scale is left alone: the argmax is the same.
    """
    inverse = 1 / torch.where(temperature > 0, temperature.clamp(min=COLDEST), 1.0)
    scaled = log_p * inverse[:, None]
    if ban == 0:
        return scaled
    charge = torch.where(neighbours >= 0, -ban * inverse[:, None], 0.0)
    return scaled.scatter_add_(1, neighbours.clamp(min=0), charge)


def weights(scaled: Tensor, min_p: float) -> Tensor:
    """Step 5: probabilities (N, V) up to a factor, 0 where below `min_p` of the largest."""
    if min_p == 0:
        return scaled.softmax(dim=1)
    relative = (scaled - scaled.amax(dim=1, keepdim=True)).exp_()
    just_below = float(np.nextafter(np.float32(min_p), np.float32(0)))
    return F.threshold(relative, just_below, 0.0, inplace=True)


def inverse_cdf(weight: Tensor, uniform: Tensor) -> Tensor:
    """One id per row of weight (N, V): the first whose cumulative share exceeds uniform (N,).

    The CDF is float64 over blocks of the vocabulary, then inside the block that was hit. What is
    left of the uniform there is scaled to the block's own float64 sum: rounding in the float32
    sums of blocks then changes a token's share by a part in 10^7 of itself, however rare it is.
    """
    N, V = weight.shape
    whole = V // CDF_BLOCK * CDF_BLOCK
    blocks = weight[:, :whole].view(N, whole // CDF_BLOCK, CDF_BLOCK)
    sums = [blocks.sum(dim=2), weight[:, whole:].sum(dim=1, keepdim=True)]
    mass = torch.cat(sums, dim=1).double()
    cdf = mass.cumsum(dim=1)
    target = uniform * cdf[:, -1]
    block = _first_above(cdf, target)[:, None]
    before, own = (cdf - mass).gather(1, block)[:, 0], mass.gather(1, block)[:, 0]
    # The last block may be short: its missing columns repeat the last one, with weight 0.
    columns = block * CDF_BLOCK + torch.arange(CDF_BLOCK, device=weight.device)
    inside = weight.gather(1, columns.clamp(max=V - 1)).double()
    inside = inside.masked_fill_(columns >= V, 0.0).cumsum(dim=1)
    share = ((target - before) / own).clamp(0.0, 1.0)
    found = block[:, 0] * CDF_BLOCK + _first_above(inside, share * inside[:, -1])
    return found.clamp(max=V - 1)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry of each row of `cdf` above `target`: never one of probability 0.

    Rounding can lift the target to the total; it is held just below, where the last id of positive
    probability answers. In a row of nan the answer means nothing, but is an index.
    """
    total = cdf[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    found = torch.searchsorted(cdf, torch.minimum(target, below)[:, None], right=True)[:, 0]
    return found.clamp(max=cdf.shape[1] - 1)
