"""Fixed probes: the same held-out rows and the same stored masks for every model of a run.

A difference between two checkpoints then carries no sampling noise. Masks are stored, not a seed,
so that no change of code can move a curve; a probe's digest travels with every figure, and figures
of two digests are not compared. Source: spec algorithms 4.1, 4.3, 4.4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import ProbeConfig, Stage, UserError
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.generate import generate
from diffurefill.model import denoiser as model
from diffurefill.runtime import philox

Denoiser = Callable[..., Tensor]

IDS, SEGMENTS, DECODING = "ids", "doc_ids", "decoding"
"""Names of a probe's arrays; the masks are named by their rates."""
MAX_LOGITS = 1 << 28
"""Of a batch, were all its positions asked for: 1 GiB in float32. A probe is scored beside the
weights, gradients and moments of a run."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Held-out rows and their masks. `ids` int64 and `doc_ids` int32 are (R, T)."""

    ids: np.ndarray
    doc_ids: np.ndarray
    masks: dict[float, np.ndarray]
    """{mask rate: (R, T) bool}, the rates that the held-out CE averages."""
    decoding_mask: np.ndarray
    """(R, T) bool: what the decoding-accuracy probe hides."""

    @property
    def digest(self) -> str:
        """First 12 hex digits of a sha256 over every array: the probe's version."""
        h = hashlib.sha256()
        for name, array in sorted(self.arrays().items()):
            h.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return h.hexdigest()[:12]

    def arrays(self) -> dict[str, np.ndarray]:
        masks = {f"mask_{rate}": mask for rate, mask in self.masks.items()}
        return {IDS: self.ids, SEGMENTS: self.doc_ids, DECODING: self.decoding_mask, **masks}

    def head(self, num_rows: int) -> Probe:
        """The first rows: a cheaper probe for a worker's waiting time."""
        masks = {rate: mask[:num_rows] for rate, mask in self.masks.items()}
        arrays = self.ids[:num_rows], self.doc_ids[:num_rows]
        return Probe(*arrays, masks, self.decoding_mask[:num_rows])


def make_probe(
    ids: np.ndarray,
    doc_ids: np.ndarray,
    config: ProbeConfig,
    *,
    seed: int,
    bos_id: int,
    key: tuple[str, ...] = (),
) -> Probe:
    """The first `config.num_rows` of rows (R, T) with drawn masks; with a `key` the rows are not
    held out but of a source of their own. UserError where there are fewer."""
    if len(ids) < config.num_rows:
        way_out = "" if key else "raise data.held_out_fraction, "
        raise UserError(
            f"{'its' if key else 'the held-out'} text fills {len(ids)} rows, the probe wants "
            f"{config.num_rows}: {way_out}lower probe.num_rows, or give more text"
        )
    ids, doc_ids = ids[: config.num_rows], doc_ids[: config.num_rows]
    return draw_masks(ids, doc_ids, config, seed=seed, bos_id=bos_id, key=key)


def draw_masks(
    ids: np.ndarray,
    doc_ids: np.ndarray,
    config: ProbeConfig,
    *,
    seed: int,
    bos_id: int,
    key: tuple[str, ...] = (),
) -> Probe:
    """Masks for rows (R, T), drawn token by token; BOS and PAD stay visible. `key` tells the draws
    of one set from those of another."""
    can_mask = (doc_ids >= 0) & (ids != bos_id)

    def draw(rate: float, purpose: str) -> np.ndarray:
        return can_mask & (philox(seed, "probe", *key, purpose).random(ids.shape) < rate)

    masks = {rate: draw(rate, str(rate)) for rate in config.mask_rates}
    return Probe(ids, doc_ids, masks, draw(config.decoding_mask_rate, DECODING))


def row_values(rows: Sequence[tuple[float, int]]) -> list[float]:
    """(sum, count) of each row, as values a row whose plain mean is the pooled mean.

    They are the pooled mean linearised in the rows, so that resampling them is, to first order,
    resampling whole rows with their counts; and the difference of two models' values has the
    difference of their pooled means as its mean, for counts are the same for every model.
    """
    total = max(sum(n for _, n in rows), 1)
    mean = sum(part for part, _ in rows) / total
    return [mean + (part - mean * n) * len(rows) / total for part, n in rows]


@dataclass(frozen=True)
class HeldOut:
    """Held-out cross entropy in nats per masked token."""

    probe: str
    """Digest of the probe."""
    by_rate: dict[float, float]
    rows: dict[float, list[tuple[float, int]]]
    """Per rate and row: summed CE and masked tokens, so that models can be compared in pairs."""

    @property
    def mean(self) -> float:
        """The headline: plain mean over the rates (pooling would overweight the highest)."""
        return sum(self.by_rate.values()) / len(self.by_rate)

    def row_means(self) -> list[float]:
        """CE of each row, over all its masked tokens at all rates; rows without any are left out
        (the same ones for every model, since masks are stored)."""
        per_row = zip(*self.rows.values(), strict=True)
        totals = [(sum(s for s, _ in row), sum(n for _, n in row)) for row in per_row]
        return [ce / n for ce, n in totals if n]

    def row_values(self) -> list[float]:
        """A value a row whose plain mean is `mean`: what a paired difference is made of."""
        by_rate = [row_values(rows) for rows in self.rows.values()]
        return [sum(row) / len(row) for row in zip(*by_rate, strict=True)]

    @property
    def counts(self) -> list[list[int]]:
        """Tokens scored, by rate and row: figures are compared only where these are equal."""
        return [[n for _, n in rows] for rows in self.rows.values()]

    def to_json(self) -> dict[str, Any]:
        by_rate = {str(rate): ce for rate, ce in self.by_rate.items()}
        rows = {str(rate): rows for rate, rows in self.rows.items()}
        return {"probe": self.probe, "mean": self.mean, "by_rate": by_rate, "rows": rows}


@torch.inference_mode()
def held_out_ce(
    denoiser: Denoiser, probe: Probe, *, mask_id: int, device: torch.device, batch_rows: int = 16
) -> HeldOut:
    """CE of the original tokens at each stored mask. Does not depend on `batch_rows`, which are
    fewer where their logits would be too many.

    The autoregressive twin is asked for the same tokens, each from all that stand to its left in
    the document; a document's first token, from which nothing is left of it, is not counted.
    """
    by_rate, rows = {}, {}
    batch_rows = _rows_at_once(denoiser, probe, batch_rows)
    for rate, mask in probe.masks.items():
        per_row = []
        for first in range(0, len(probe.ids), batch_rows):
            part = slice(first, first + batch_rows)
            per_row += _row_ce(denoiser, probe, mask[part], part, mask_id, device)
        rows[rate] = per_row
        by_rate[rate] = sum(s for s, _ in per_row) / max(sum(n for _, n in per_row), 1)
    return HeldOut(probe.digest, by_rate, rows)


def _row_ce(
    denoiser: Denoiser,
    probe: Probe,
    mask: np.ndarray,
    part: slice,
    mask_id: int,
    device: torch.device,
) -> list[tuple[float, int]]:
    """Summed CE and number of masked tokens of each row of one batch."""
    ids = torch.from_numpy(probe.ids[part]).to(device)
    at = torch.from_numpy(mask).to(device)
    doc_ids = torch.from_numpy(probe.doc_ids[part]).to(device)
    if is_causal(denoiser):
        at = at & has_left(doc_ids)
        logits = denoiser(ids, doc_ids, at.roll(-1, dims=1))
    else:
        logits = denoiser(ids.masked_fill(at, mask_id), doc_ids, at)
    ce = torch.nn.functional.cross_entropy(logits.float(), ids[at], reduction="none").double()
    sums = torch.zeros(len(ids), dtype=torch.float64, device=device)
    sums.index_add_(0, at.nonzero()[:, 0], ce)
    return list(zip(sums.tolist(), at.sum(1).tolist(), strict=True))


def _rows_at_once(denoiser: Denoiser, probe: Probe, most: int) -> int:
    if not isinstance(denoiser, model.Denoiser):
        return most
    logits_of_row = probe.ids.shape[1] * denoiser.config.vocab_size
    return max(1, min(most, MAX_LOGITS // logits_of_row))


def is_causal(denoiser: Denoiser) -> bool:
    """Whether this is the autoregressive twin, whose logits at a position are of the next token."""
    return isinstance(denoiser, model.Denoiser) and denoiser.config.causal


def has_left(doc_ids: Tensor) -> Tensor:
    """(B, T) bool: positions with one of their own document to the left."""
    same = torch.zeros_like(doc_ids, dtype=torch.bool)
    same[:, 1:] = (doc_ids[:, 1:] == doc_ids[:, :-1]) & (doc_ids[:, 1:] >= 0)
    return same


@dataclass(frozen=True)
class DecodingAccuracy:
    """Shares in [0, 1]. `pair`: both right, over adjacent positions that were both masked."""

    probe: str
    token: float
    pair: float
    num_forward_passes: int
    """Of a row."""
    token_rows: list[tuple[int, int]]
    """(right, masked) of each row."""
    pair_rows: list[tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def decoding_accuracy(
    denoiser: Denoiser,
    probe: Probe,
    *,
    specials: Specials,
    device: torch.device,
    num_passes: int,
) -> DecodingAccuracy:
    """Fill the stored mask greedily by confidence in `num_passes` passes and compare (spec 4.3).

    The linear quota stands for the spec's ceil(remaining / passes left): the same passes, the
    rounding differs by at most one token a pass. The autoregressive twin cannot fill gaps.
    """
    if is_causal(denoiser):
        raise UserError("a causal model fills no gaps: decoding accuracy is of a denoiser")
    original, mask = torch.from_numpy(probe.ids), torch.from_numpy(probe.decoding_mask)
    ids, doc_ids = original.masked_fill(mask, specials.mask_id), torch.from_numpy(probe.doc_ids)
    greedy, passes = Stage(num_passes=num_passes, temperature=(0.0, 0.0)), 0
    for rows in torch.arange(len(ids)).split(_rows_at_once(denoiser, probe, len(ids))):
        if not mask[rows].any():
            continue
        canvas = Canvas(ids[rows], mask[rows], doc_ids[rows]).to(device)
        done = generate(denoiser, canvas, [greedy], specials, seeds=[0] * len(rows))
        ids[rows], passes = done.ids.cpu(), max(passes, done.num_forward_passes)
    right = (ids == original) & mask
    token_rows = _right_of(right, mask)
    pair_rows = _right_of(right[:, 1:] & right[:, :-1], mask[:, 1:] & mask[:, :-1])
    return DecodingAccuracy(
        probe=probe.digest,
        token=_pooled(token_rows),
        pair=_pooled(pair_rows),
        num_forward_passes=passes,
        token_rows=token_rows,
        pair_rows=pair_rows,
    )


def _right_of(right: Tensor, asked: Tensor) -> list[tuple[int, int]]:
    """(right, asked) of each row of two (R, T) bool."""
    return list(zip(right.sum(1).tolist(), asked.sum(1).tolist(), strict=True))


def _pooled(rows: Sequence[tuple[int, int]]) -> float:
    return sum(right for right, _ in rows) / max(sum(n for _, n in rows), 1)
