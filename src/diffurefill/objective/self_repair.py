"""Rows that learn to mend the model's own draft: an idea that the card's pilot did not confirm.

A clean row is masked at a small rate and filled by the model's own samples in one pass; the least
sure fifth of them is masked again, and the model learns the original tokens there, with its own
tokens around them. Source: spec algorithms 5.7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import ObjectiveConfig
from diffurefill.objective.corruption import Corrupted, Key, RowArrays
from diffurefill.runtime import philox

REMASKED = 0.2
"""Of the filled positions, as in a refill pass."""

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(canvas (1, T), doc_ids (1, T), at (1, T) bool) -> logits (N, V), without gradients."""


def self_repair(
    corrupted: Corrupted,
    rows: RowArrays,
    predict: Predict,
    config: ObjectiveConfig,
    *,
    keys: Sequence[Key],
    mask_id: int,
    bos_id: int,
) -> Corrupted:
    """`corrupted` with a share `config.self_repair` of its rows made anew from `rows`.

    Which rows, what is filled and what is drawn hang on a row's key and the weights alone. Rows
    cut into short parts stay as they are. Ids from `mask_id` on are never drawn, nor is BOS.
    """
    canvas, is_masked = corrupted.canvas.clone(), corrupted.is_masked.clone()
    t, num_eligible = corrupted.t.clone(), corrupted.num_eligible.clone()
    has_prefix = corrupted.has_prefix.clone()
    can_mask = (rows.doc_ids >= 0) & (rows.ids != bos_id)
    for row, key in enumerate(keys):
        rng = philox(*key, "self repair")
        is_whole = rows.part_lengths[row] == rows.ids.shape[1]
        if rng.random() >= config.self_repair or not is_whole or not can_mask[row].any():
            continue
        filled = _filled(can_mask[row], config.self_repair_rate, rng)
        ids, doc_ids = (torch.from_numpy(x[row]) for x in (rows.ids, rows.doc_ids))
        seen = ids.long().masked_fill(filled, mask_id)
        logits = predict(seen[None], doc_ids[None], filled[None]).clone()
        logits[:, mask_id:], logits[:, bos_id] = -torch.inf, -torch.inf
        tokens, sure = _draw(logits, rng)
        count = max(1, round(REMASKED * len(tokens)))
        again = sure.argsort(stable=True)[:count]
        tokens[again] = mask_id
        canvas[row] = seen.masked_scatter(filled, tokens)
        is_masked[row] = canvas[row] == mask_id
        part, eligible = corrupted.parts[row, 0], int(can_mask[row].sum())
        t[part], num_eligible[part], has_prefix[part] = count / eligible, eligible, False
    return corrupted._replace(
        canvas=canvas, is_masked=is_masked, t=t, num_eligible=num_eligible, has_prefix=has_prefix
    )


def _filled(can_mask: np.ndarray, rate: tuple[float, float], rng: np.random.Generator) -> Tensor:
    """(T,) bool: at least one of `can_mask`, each at a rate drawn between the two."""
    low, high = rate
    filled = can_mask & (rng.random(len(can_mask)) < low + (high - low) * rng.random())
    if not filled.any():
        filled[rng.choice(np.flatnonzero(can_mask))] = True
    return torch.from_numpy(filled)


def _draw(logits: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A token of each distribution (N, V) at temperature 1 and its log-probability, (N,), on CPU.

    By inverting the CDF in float64, one uniform each: exact, and the same on every run.
    """
    uniform = torch.from_numpy(rng.random(len(logits))).to(logits.device)
    log_p = logits.double().log_softmax(dim=1)
    cdf = log_p.exp().cumsum(dim=1)
    # Just below the total, so that rounding never lands behind the last id of any probability.
    target = torch.minimum(uniform * cdf[:, -1], cdf[:, -1] * (1 - 1e-12))
    # Of NaN logits it is behind the last id: what says so is the step, of its loss.
    tokens = torch.searchsorted(cdf, target[:, None], right=True).clamp(max=logits.shape[1] - 1)
    return tokens[:, 0].cpu(), log_p.gather(1, tokens)[:, 0].cpu()
