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
BELOW_ONE = 1 - 2.0**-52
"""Uniforms are held to it: times a positive float64 it is below that number, whatever the rounding,
so that the last id of positive probability answers at the latest."""
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

    neighbours: Tensor | None
    """(N, 2) int64: tokens standing beside, an id that is never written for none; None where there
    is no ban."""
    uniform: Tensor
    """(N,) float64 in [0, 1)."""
    temperature: Tensor
    """(N,) float32; 0 is greedy."""
    no_eos: Tensor | None = None
    """(N,) bool: where EOS is forbidden too; None where nowhere."""

    def part(self, which: slice) -> Places:
        neighbours = None if self.neighbours is None else self.neighbours[which]
        no_eos = None if self.no_eos is None else self.no_eos[which]
        return Places(neighbours, self.uniform[which], self.temperature[which], no_eos)


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


def beside(doc_ids: Tensor) -> Tensor:
    """Left and right of every position of (B, T), as indices of the B * T: (B, T, 2) int64.

    Where its document does not go on, the position itself.
    """
    here = torch.arange(doc_ids.numel(), device=doc_ids.device).view_as(doc_ids)
    same = (doc_ids[:, 1:] == doc_ids[:, :-1]).long()
    return torch.stack([here - F.pad(same, (1, 0)), here + F.pad(same, (0, 1))], dim=2)


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
        allowed = _allowed(logits[which], rules, None if no_eos is None else no_eos[which])
        found.append(allowed.log_softmax(dim=1).gather(1, tokens[which, None])[:, 0])
    return torch.cat(found)


def _allowed(logits: Tensor, rules: Rules, no_eos: Tensor | None) -> Tensor:
    """A float32 copy of logits (N, V), -inf where nothing may be written: (N, V'), V' being whole
    blocks of the CDF."""
    N, V = logits.shape
    allowed = logits.new_empty((N, -(-V // CDF_BLOCK) * CDF_BLOCK), dtype=torch.float32)
    allowed[:, :V].copy_(logits)
    allowed[:, V:].fill_(-torch.inf)
    allowed.index_fill_(1, rules.forbidden, -torch.inf)
    if no_eos is not None:
        allowed[:, rules.eos_id].masked_fill_(no_eos, -torch.inf)
    return allowed


def _sample_part(logits: Tensor, places: Places, rules: Rules, greedy: bool | None) -> Drawn:
    work = _allowed(logits, rules, places.no_eos)
    log_p = work.log_softmax(dim=1)
    # From here on in place: fresh memory would cost about as much as the arithmetic.
    scaled = scaled_logits(
        log_p, places.neighbours, places.temperature, rules.neighbour_ban, out=work
    )
    if greedy:
        tokens = scaled.argmax(dim=1)
    else:
        best = scaled.argmax(dim=1) if greedy is None else None
        tokens = inverse_cdf(weights_(scaled, rules.min_p), places.uniform)
        # In a row of nan the answer may lie behind the vocabulary.
        tokens = tokens.clamp(max=logits.shape[1] - 1)
        if best is not None:
            tokens = torch.where(places.temperature == 0, best, tokens)
    confidence = log_p.gather(1, tokens[:, None])[:, 0]
    return Drawn(tokens, confidence, *_measures(log_p, rules.measures))


def _measures(log_p: Tensor, wanted: tuple[str, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Margin and entropy, each (N,) where wanted."""
    margin = entropy = None
    if "margin" in wanted:
        best = log_p.topk(2, dim=1).values.exp()
        margin = (best[:, 0] - best[:, 1]).clamp(min=1e-38).log()
    if "entropy" in wanted:
        entropy = torch.special.entr(log_p.exp()).sum(dim=1)
    return margin, entropy


def scaled_logits(
    log_p: Tensor,
    neighbours: Tensor | None,
    temperature: Tensor,
    ban: float,
    out: Tensor | None = None,
) -> Tensor:
    """Steps 3 and 4, ban and temperature, of log_p (N, V): (N, V), in `out` or a new tensor.

    Where temperature (N,) is 0 the scale is left alone: the argmax is the same. A token standing on
    both sides is charged once.
    """
    inverse = 1 / torch.where(temperature > 0, temperature.clamp(min=COLDEST), 1.0)[:, None]
    scaled = torch.mul(log_p, inverse, out=out)
    if neighbours is None:
        return scaled
    return scaled.scatter_(1, neighbours, scaled.gather(1, neighbours) - ban * inverse)


def weights_(scaled: Tensor, min_p: float) -> Tensor:
    """Step 5: probabilities (N, V) up to a factor, 0 where below `min_p` of the largest. They
    replace what `scaled` held: softmax writes an element only after its row has been read."""
    if min_p == 0:
        return torch.softmax(scaled, dim=1, out=scaled)
    relative = scaled.sub_(scaled.amax(dim=1, keepdim=True)).exp_()
    just_below = float(np.nextafter(np.float32(min_p), np.float32(0)))
    return F.threshold(relative, just_below, 0.0, inplace=True)


def inverse_cdf(weight: Tensor, uniform: Tensor) -> Tensor:
    """One id per row of weight (N, V): the first whose cumulative share exceeds uniform (N,).

    The CDF is float64 over blocks of the vocabulary, then inside the block that was hit. What is
    left of the uniform there is scaled to the block's own float64 sum: rounding in the float32
    sums of blocks then changes a token's share by a part in 10^7 of itself, however rare it is.
    In a row of nan the answer means nothing, and may lie behind the last id.
    """
    padding = -weight.shape[1] % CDF_BLOCK
    whole = F.pad(weight, (0, padding)) if padding else weight
    blocks = whole.unflatten(1, (-1, CDF_BLOCK))
    mass = blocks.sum(dim=2)
    cdf = mass.cumsum(dim=1, dtype=torch.float64)
    target = uniform.clamp(max=BELOW_ONE)[:, None] * cdf[:, -1:]
    block = _first_above(cdf, target).clamp(max=blocks.shape[1] - 1)
    own = mass.gather(1, block)
    before = cdf.gather(1, block) - own
    hit = blocks.gather(1, block[:, :, None].expand(-1, 1, CDF_BLOCK))[:, 0]
    inside = hit.cumsum(dim=1, dtype=torch.float64)
    share = ((target - before) / own).clamp(0.0, BELOW_ONE)
    return (block * CDF_BLOCK + _first_above(inside, share * inside[:, -1:]))[:, 0]


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Index (N, 1) of the first entry of each row of `cdf` above `target` (N, 1), which is below
    the last entry: never one of probability 0. In a row of nan an index too far."""
    return torch.searchsorted(cdf, target, right=True)
