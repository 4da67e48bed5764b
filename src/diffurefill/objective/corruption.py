"""Rows -> corrupted rows (spec algorithms 1.1, 1.2, 1.4). Pure: a row depends on its key alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import ObjectiveConfig
from diffurefill.runtime import philox

Key = tuple[int | str, ...]

SMALLEST_RATE = 1e-3
"""Floor of t when t_min is 0: the elbo weight 1 / t stays finite (spec 1.2)."""


class Corrupted(NamedTuple):
    """What the denoiser sees, and what the loss needs to know of how it came about. On CPU."""

    canvas: Tensor
    """(B, T) int64: the rows with `mask_id` at the masked positions."""
    is_masked: Tensor
    """(B, T) bool."""
    t: Tensor
    """(B,) float32: each row's mask rate."""
    num_eligible: Tensor
    """(B,) int64: positions that could have been masked."""


def corrupt(
    ids: np.ndarray,
    doc_ids: np.ndarray,
    config: ObjectiveConfig,
    *,
    keys: Sequence[Key],
    mask_id: int,
    bos_id: int,
) -> Corrupted:
    """Mask `ids` (B, T) int64; `doc_ids` (B, T) int32 is -1 on PAD; one key for `philox` per row.

    PAD and BOS are never masked; EOS is, for the model must learn to end.
    """
    can_mask = (doc_ids >= 0) & (ids != bos_id)
    rows = [_mask_row(row, config, philox(*key)) for row, key in zip(can_mask, keys, strict=True)]
    is_masked = np.stack([row.is_masked for row in rows])
    return Corrupted(
        canvas=torch.from_numpy(np.where(is_masked, mask_id, ids).astype(np.int64)),
        is_masked=torch.from_numpy(is_masked),
        t=torch.tensor([row.t for row in rows], dtype=torch.float32),
        num_eligible=torch.tensor([row.num_eligible for row in rows]),
    )


class _Row(NamedTuple):
    is_masked: np.ndarray
    t: float
    num_eligible: int


def _mask_row(can_mask: np.ndarray, config: ObjectiveConfig, rng: np.random.Generator) -> _Row:
    """One row, in the order of the spec's steps; `can_mask` is (T,) bool."""
    T = len(can_mask)
    eligible = can_mask.copy()
    if rng.random() < config.prefix_rows:
        eligible[: rng.integers(T)] = False
    low = max(config.t_min, SMALLEST_RATE)
    t = low + (1.0 - low) * rng.random()
    is_masked = eligible & (rng.random(T) < t)
    # An elbo row without a mask rightly counts 0; forcing one would bias it by up to 1 / t.
    if config.loss != "elbo" and eligible.any() and not is_masked.any():
        is_masked[rng.choice(np.flatnonzero(eligible))] = True
    return _Row(is_masked, t, int(eligible.sum()))
