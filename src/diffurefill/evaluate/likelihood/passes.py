"""Rows to be read, in as few forward tokens as they can be: each distinct row once, no padding.

Every scorer asks for rows: a canvas, and the positions whose tokens it wants the probability of.
Rows that are the same canvas are read once (the first row of all choices of one length, common
beginnings, all choices of one token), and rows of one length make a batch without padding or
masks: all rows of a continuation have one length, so there are enough of them. The head and the
last block run at the wanted positions alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.decode.generate import Denoiser
from diffurefill.evaluate.likelihood.texts import Ids
from diffurefill.runtime import not_finite

Sureness = Literal["confidence", "margin", "entropy"]

BATCH_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 16}
"""Tokens of one forward pass, by device: what fills it, without keeping much in memory."""
BATCH_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Logits (wanted positions times vocabulary) of one forward pass."""


@dataclass(frozen=True, eq=False)
class Row:
    """A canvas (T,) int32 whose positions `at` (n,), ascending, are asked about `tokens` (n,)."""

    canvas: Ids
    at: NDArray[np.int64]
    tokens: Ids
    first: int
    """Where the context ends: guidance hides what stands before."""


class Reading(NamedTuple):
    """What a row's pass said at each of its n positions."""

    log_prob: NDArray[np.float64]
    """Of the token asked about, over the whole vocabulary, in nats."""
    is_top: NDArray[np.bool_]
    """Whether no token is more likely."""
    sureness: NDArray[np.float64]
    """The higher, the surer; zeros where the reader was not asked for it."""


@dataclass
class Cost:
    """What scoring took; plain counts that add up."""

    rows_asked: int = 0
    """Rows that scorers asked for: forward passes without sharing."""
    rows_read: int = 0
    """Distinct rows among them, twice with guidance: what went through the model."""
    num_forward_passes: int = 0
    """Calls of the model, a batch of rows each."""
    tokens_asked: int = 0
    forward_tokens: int = 0
    """Tokens of the rows read."""

    def __add__(self, other: Cost) -> Cost:
        mine, theirs = asdict(self), asdict(other)
        return Cost(**{name: count + theirs[name] for name, count in mine.items()})

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(eq=False)
class Reader:
    """A model that reads rows. The same rows give the same readings in any order."""

    denoiser: Denoiser
    """In eval mode, on `device`."""
    mask_id: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype | None = None
    """Autocast to this; None reads in the weights' own precision."""
    guidance: float = 0.0
    """w of unsupervised classifier-free guidance: logits u + (1 + w)(c - u), with u read from the
    same row without its context (SMDM). 0 is the plain model."""
    sureness: Sureness | None = None
    batch_tokens: int | None = None
    """Tokens of a forward pass; by device when None. Changes the results by rounding only."""
    cost: Cost = field(default_factory=Cost)

    def read(self, rows: Sequence[Row]) -> list[Reading]:
        """One reading per row. Raises UserError for logits that are not finite."""
        distinct, of_row = self._distinct(rows)
        found: list[Reading | None] = [None] * len(rows)
        with torch.inference_mode(), self.autocast():
            for batch in self._batches(distinct):
                for index, reading in self._read_batch(batch, distinct, of_row, rows):
                    found[index] = reading
        self.cost.rows_asked += len(rows)
        self.cost.tokens_asked += sum(len(row.canvas) for row in rows)
        readings = [reading for reading in found if reading is not None]
        assert len(readings) == len(rows)
        return readings

    def _distinct(self, rows: Sequence[Row]) -> tuple[list[_Distinct], list[list[int]]]:
        """Distinct canvases with all positions asked about, and the rows that each stands for."""
        index: dict[tuple[bytes, int], int] = {}
        of_row: list[list[int]] = []
        for i, row in enumerate(rows):
            key = row.canvas.tobytes(), row.first if self.guidance else 0
            where = index.setdefault(key, len(index))
            if where == len(of_row):
                of_row.append([])
            of_row[where].append(i)
        distinct = []
        for group in of_row:
            row = rows[group[0]]
            at = (
                row.at
                if len(group) == 1
                else np.unique(np.concatenate([rows[i].at for i in group]))
            )
            distinct.append(_Distinct(row.canvas, at, row.first))
        return distinct, of_row

    def _batches(self, rows: Sequence[_Distinct]) -> Iterator[list[int]]:
        """Indices of rows of one length, shortest first, as many as fit one pass."""
        max_tokens = self.batch_tokens or BATCH_TOKENS[self.device.type]
        max_wanted = BATCH_LOGITS[self.device.type] // self.vocab_size
        batch: list[int] = []
        num_wanted = 0
        for i in sorted(range(len(rows)), key=lambda i: len(rows[i].canvas)):
            length, wanted = len(rows[i].canvas), len(rows[i].at)
            is_full = batch and (
                length != len(rows[batch[0]].canvas)
                or (len(batch) + 1) * length > max_tokens
                or num_wanted + wanted > max_wanted
            )
            if is_full:
                yield batch
                batch, num_wanted = [], 0
            batch.append(i)
            num_wanted += wanted
        if batch:
            yield batch

    def _read_batch(
        self,
        batch: Sequence[int],
        distinct: Sequence[_Distinct],
        of_row: Sequence[Sequence[int]],
        rows: Sequence[Row],
    ) -> Iterator[tuple[int, Reading]]:
        """(index of a row, its reading) for all rows that the batch's canvases stand for."""
        members = [distinct[i] for i in batch]
        logits = self._logits(members)  # (N, V), N = all positions wanted
        starts = np.cumsum([0, *(len(row.at) for row in members)])
        wanted, slots = [], []
        for where, start in zip(batch, starts, strict=False):
            for i in of_row[where]:
                wanted.append(i)
                slots.append(start + np.searchsorted(distinct[where].at, rows[i].at))
        tokens = [rows[i].tokens for i in wanted]
        yield from zip(wanted, self.judged(logits, slots, tokens), strict=True)

    def judged(
        self, logits: Tensor, slots: Sequence[NDArray[np.int64]], tokens: Sequence[Ids]
    ) -> Iterator[Reading]:
        """Of each row, what `logits` (N, V) at its `slots` (n,) say of its `tokens` (n,).

        Raises UserError for logits that are not finite.
        """
        slot = torch.from_numpy(np.concatenate(slots)).to(self.device)
        token = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(self.device)
        log_prob = (logits[slot, token] - logits.logsumexp(dim=1)[slot]).double().cpu().numpy()
        if not np.isfinite(log_prob).all():
            raise not_finite("the denoiser", self.dtype)
        is_top = (logits.argmax(dim=1)[slot] == token).cpu().numpy()
        sureness = np.zeros(len(log_prob))
        if self.sureness is not None:
            sureness = sureness_of(logits, self.sureness)[slot].double().cpu().numpy()
        ends = np.cumsum([len(asked) for asked in tokens])[:-1]
        parts = (np.split(values, ends) for values in (log_prob, is_top, sureness))
        yield from map(Reading, *parts)

    def _logits(self, rows: Sequence[_Distinct]) -> Tensor:
        """Logits (N, V) float32 at all wanted positions of rows of one length, row-major."""
        canvas = torch.from_numpy(np.stack([row.canvas for row in rows]).astype(np.int64))
        at = torch.zeros(canvas.shape, dtype=torch.bool)
        for row, wanted in zip(rows, at, strict=True):
            wanted[torch.from_numpy(row.at)] = True
        if not self.guidance:
            return self._forward(canvas, at)
        blind = canvas.clone()
        for row, ids in zip(rows, blind, strict=True):
            ids[1 : row.first] = self.mask_id
        guided, plain = self._forward(torch.cat([canvas, blind]), torch.cat([at, at])).chunk(2)
        return plain + (1 + self.guidance) * (guided - plain)

    def _forward(self, canvas: Tensor, at: Tensor) -> Tensor:
        self.cost.num_forward_passes += 1
        self.cost.rows_read += len(canvas)
        self.cost.forward_tokens += canvas.numel()
        return self.denoiser(canvas.to(self.device), None, at).float()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


class _Distinct(NamedTuple):
    canvas: Ids
    at: NDArray[np.int64]
    first: int


def sureness_of(logits: Tensor, kind: Sureness) -> Tensor:
    """How sure the model is at each position of `logits` (N, V), (N,): the highest log-probability,
    the gap between the two highest probabilities, or minus the entropy in nats."""
    log_probs = logits.log_softmax(dim=1)
    if kind == "confidence":
        return log_probs.amax(dim=1)
    if kind == "margin":
        first, second = log_probs.topk(2, dim=1).values.exp().unbind(dim=1)
        return first - second
    return torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(dim=1)
