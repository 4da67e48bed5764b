"""Rows -> corrupted rows (spec algorithms 1.1, 1.2, 1.4, 1.7, 1.8). Pure: a row depends on its
key alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import ObjectiveConfig
from diffurefill.runtime import philox

Key = tuple[int | str, ...]

SMALLEST_RATE = 1e-3
"""Floor of t when t_min is 0: the elbo weight 1 / t stays finite (spec 1.2)."""


class Corrupted(NamedTuple):
    """What the denoiser sees, and what the loss needs to know of how it came about. On CPU.

    A *part* is what has a mask rate of its own: a row, or one of the P pieces of a short row.
    """

    canvas: Tensor
    """(B, T) int64: the rows with `mask_id` at the masked positions."""
    is_masked: Tensor
    """(B, T) bool: where a target is."""
    targets: Tensor
    """(B, T) int64: what the model should say there; meaningless elsewhere."""
    parts: Tensor
    """(B, T) int64: the part of each position, counted through the batch; without short rows, the
    row's number."""
    t: Tensor
    """(P,) float32: each part's mask rate."""
    num_eligible: Tensor
    """(P,) int64: positions that could have been masked."""
    has_prefix: Tensor
    """(P,) bool: a clean prefix left out some that could have been."""


class RowArrays(Protocol):
    """Rows as data.packing makes them, B of T positions each."""

    @property
    def ids(self) -> np.ndarray:
        """(B, T) int64."""
        ...

    @property
    def doc_ids(self) -> np.ndarray:
        """(B, T) int32, -1 on PAD."""
        ...

    @property
    def span_ids(self) -> np.ndarray:
        """(B, T) int32, 0 outside spans."""
        ...

    @property
    def part_lengths(self) -> np.ndarray:
        """(B,) int32: each divides T."""
        ...


def corrupt(
    rows: RowArrays,
    config: ObjectiveConfig,
    *,
    keys: Sequence[Key],
    mask_id: int,
    bos_id: int,
) -> Corrupted:
    """Mask `rows`; one key for `philox` per row.

    PAD and BOS are never masked; EOS is, for the model must learn to end.
    """
    ids = rows.ids
    can_mask = (rows.doc_ids >= 0) & (ids != bos_id)
    parts = [
        _mask_part(can_mask[row, at], rows.span_ids[row, at], config, philox(*key))
        for row, at, key in _parts(rows.part_lengths, ids.shape[1], keys)
    ]
    is_masked = np.concatenate([part.is_masked for part in parts]).reshape(ids.shape)
    return Corrupted(
        canvas=torch.from_numpy(np.where(is_masked, mask_id, ids).astype(np.int64)),
        is_masked=torch.from_numpy(is_masked),
        targets=torch.from_numpy(ids.astype(np.int64)),
        parts=torch.from_numpy(part_of_positions(rows.part_lengths, ids.shape[1])),
        t=torch.tensor([part.t for part in parts], dtype=torch.float32),
        num_eligible=torch.tensor([part.num_eligible for part in parts]),
        has_prefix=torch.tensor([part.has_prefix for part in parts]),
    )


def part_of_positions(part_lengths: np.ndarray, T: int) -> np.ndarray:
    """(B, T) int64: the part of each position, given the length (B,) of each row's parts."""
    lengths = np.repeat(part_lengths, T // part_lengths)
    return np.repeat(np.arange(len(lengths)), lengths).reshape(len(part_lengths), T)


def _parts(part_lengths: np.ndarray, T: int, keys: Sequence[Key]) -> list[tuple[int, slice, Key]]:
    """(row, positions, key) of every part, in order; a row of one part has the row's own key."""
    found: list[tuple[int, slice, Key]] = []
    for row, (length, key) in enumerate(zip(part_lengths.tolist(), keys, strict=True)):
        if length == T:
            found.append((row, slice(0, T), key))
        else:
            edges = range(0, T, length)
            found += [(row, slice(at, at + length), (*key, "part", at)) for at in edges]
    return found


class _Part(NamedTuple):
    is_masked: np.ndarray
    t: float
    num_eligible: int
    has_prefix: bool


def _mask_part(
    can_mask: np.ndarray, spans: np.ndarray, config: ObjectiveConfig, rng: np.random.Generator
) -> _Part:
    """One part, in the order of the spec's steps; `can_mask` and `spans` are (T,)."""
    T = len(can_mask)
    eligible = can_mask.copy()
    if rng.random() < config.prefix_rows:
        eligible[: rng.integers(T)] = False
    low = max(config.t_min, SMALLEST_RATE)
    t = low + (1.0 - low) * rng.random()
    draws = rng.random(T)
    if spans.any():
        # All of a span shares one draw: it is masked whole or not at all, and each of its tokens
        # still with probability t, so the loss's weights stay right.
        draws = np.where(spans > 0, rng.random(spans.max() + 1)[spans], draws)
    is_masked = eligible & (draws < t)
    # An elbo row without a mask rightly counts 0; forcing one would bias it by up to 1 / t.
    if config.loss != "elbo" and eligible.any() and not is_masked.any():
        chosen = rng.choice(np.flatnonzero(eligible))
        is_masked[chosen] = True
        if spans[chosen]:
            is_masked |= eligible & (spans == spans[chosen])
    num_eligible = int(eligible.sum())
    return _Part(is_masked, t, num_eligible, num_eligible < int(can_mask.sum()))
