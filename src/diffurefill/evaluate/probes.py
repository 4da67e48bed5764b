"""Fixed probes: the same held-out rows and the same stored masks for every model of a run.

A difference between two checkpoints then carries no sampling noise. Masks are stored, not a seed,
so that no change of code can move a curve; a probe's digest travels with every figure, and figures
of two digests are not compared. Source: spec algorithms 4.1, 4.3, 4.4.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from diffurefill.config import ProbeConfig, RunConfig, Stage, UserError
from diffurefill.data.cursors import Cursor
from diffurefill.data.documents import Corpus, held_out_documents
from diffurefill.data.packing import Position, TokenDocument, pack
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.generate import generate
from diffurefill.model import denoiser as model
from diffurefill.runtime import philox

Denoiser = Callable[..., Tensor]

SAMPLED_PIECES = 16
"""Pieces of held-out documents that are read for every row of the probe."""


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
        for name, array in sorted(self._arrays().items()):
            h.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return h.hexdigest()[:12]

    def _arrays(self) -> dict[str, np.ndarray]:
        masks = {f"mask_{rate}": mask for rate, mask in self.masks.items()}
        return {"ids": self.ids, "doc_ids": self.doc_ids, "decoding": self.decoding_mask, **masks}

    def save(self, path: Path) -> None:
        save_file({k: np.ascontiguousarray(v) for k, v in self._arrays().items()}, path)

    @classmethod
    def load(cls, path: Path) -> Probe:
        arrays = load_file(path)
        masks = {float(k[5:]): v for k, v in sorted(arrays.items()) if k.startswith("mask_")}
        return cls(arrays["ids"], arrays["doc_ids"], masks, arrays["decoding"])

    def head(self, num_rows: int) -> Probe:
        """The first rows: a cheaper probe for a worker's waiting time."""
        masks = {rate: mask[:num_rows] for rate, mask in self.masks.items()}
        arrays = self.ids[:num_rows], self.doc_ids[:num_rows]
        return Probe(*arrays, masks, self.decoding_mask[:num_rows])


def build_probe(config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> Probe:
    """A run's probe: held-out text, packed as training packs it, with drawn masks.

    Rows are filled from a random sample of the first pieces that come, so that a few long documents
    do not make the whole probe.
    """
    # Whole rows without spans: what the probe asks stays the same when training's rows change.
    data = replace(config.data, packing="best_fit", short_rows=0.0, span_rows=0.0)
    texts = held_out_documents(corpus, data)
    pieces = (piece for text in texts for piece in _pieces(text, tokenizer, data.row_length))
    sample = list(itertools.islice(pieces, SAMPLED_PIECES * config.probe.num_rows))
    order = philox(config.seed, "probe", "pieces").permutation(len(sample))
    rows = pack(
        (sample[i] for i in order),
        Position(),
        data=data,
        seed=config.seed,
        slot=0,
        interval_rows=config.probe.num_rows,
        interval_steps=1,
        pad_id=tokenizer.pad_id,
    )
    chosen = list(itertools.islice(rows, config.probe.num_rows))
    ids = np.concatenate([row.ids for row in chosen])
    doc_ids = np.concatenate([row.doc_ids for row in chosen])
    return make_probe(ids, doc_ids, config.probe, seed=config.seed, bos_id=tokenizer.bos_id)


def _pieces(text: str, tokenizer: Tokenizer, row_length: int) -> Iterator[TokenDocument]:
    """The document cut to rows, each piece as a document of its own."""
    ids = np.array(tokenizer.document(text), dtype=np.int64)
    for at in range(0, len(ids), row_length):
        piece = ids[at : at + row_length]
        no_spans = partial(np.zeros, len(piece), np.int32)
        yield TokenDocument(piece, "held out", Cursor(), Cursor(), no_spans)


def make_probe(
    ids: np.ndarray, doc_ids: np.ndarray, config: ProbeConfig, *, seed: int, bos_id: int
) -> Probe:
    """Draw the masks of held-out rows (R, T), token by token; BOS and PAD stay visible."""
    if len(ids) < config.num_rows:
        raise UserError(
            f"the held-out text fills {len(ids)} rows, the probe wants {config.num_rows}: raise "
            "data.held_out_fraction, lower probe.num_rows, or give more text"
        )
    ids, doc_ids = ids[: config.num_rows], doc_ids[: config.num_rows]
    can_mask = (doc_ids >= 0) & (ids != bos_id)

    def draw(rate: float, purpose: str) -> np.ndarray:
        return can_mask & (philox(seed, "probe", purpose).random(ids.shape) < rate)

    masks = {rate: draw(rate, str(rate)) for rate in config.mask_rates}
    return Probe(ids, doc_ids, masks, draw(config.decoding_mask_rate, "decoding"))


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

    def to_json(self) -> dict[str, Any]:
        by_rate = {str(rate): ce for rate, ce in self.by_rate.items()}
        rows = {str(rate): rows for rate, rows in self.rows.items()}
        return {"probe": self.probe, "mean": self.mean, "by_rate": by_rate, "rows": rows}


@torch.inference_mode()
def held_out_ce(
    denoiser: Denoiser, probe: Probe, *, mask_id: int, device: torch.device, batch_rows: int = 16
) -> HeldOut:
    """CE of the original tokens at each stored mask. Does not depend on `batch_rows`.

    The autoregressive twin is asked for the same tokens, each from all that stand to its left in
    the document; a document's first token, from which nothing is left of it, is not counted.
    """
    by_rate, rows = {}, {}
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
    canvas = Canvas(
        ids=original.masked_fill(mask, specials.mask_id),
        fillable=mask,
        doc_ids=torch.from_numpy(probe.doc_ids),
    ).to(device)
    greedy = Stage(num_passes=num_passes, temperature=(0.0, 0.0))
    done = generate(denoiser, canvas, [greedy], specials, seeds=[0] * len(original))
    right = (done.ids.cpu() == original) & mask
    pairs = mask[:, 1:] & mask[:, :-1]
    both = right[:, 1:] & right[:, :-1]
    return DecodingAccuracy(
        probe=probe.digest,
        token=int(right.sum()) / max(int(mask.sum()), 1),
        pair=int(both.sum()) / max(int(pairs.sum()), 1),
        num_forward_passes=done.num_forward_passes,
    )
