"""The autoregressive twin: one token a pass from left to right, and as a repairer of drafts.

The baseline that draft and refill is compared with: the same canvases, keyed uniforms and inverse
CDF, the model's past kept in a cache (model/kv_cache.py). A row depends on its own ids and seed
alone. Source: spec algorithms 5.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.counts import tell
from diffurefill.decode.endings import Stop
from diffurefill.decode.generate import Generation, Pass
from diffurefill.decode.order import choose
from diffurefill.decode.sampling import Places, Rules, sample
from diffurefill.model.kv_cache import KVCache
from diffurefill.runtime import not_finite, philox

Counts = NDArray[np.int64]


class CausalModel(Protocol):
    """Logits (N, V) of the token behind each True position of `at`, with the past in `cache`."""

    def __call__(
        self,
        canvas: Tensor,
        doc_ids: Tensor | None = None,
        at: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LeftToRight:
    """How the twin draws. Temperature 0 is greedy; `min_p` drops what is less likely than this
    share of the likeliest; EOS is barred from the first `min_len` tokens, or everywhere."""

    temperature: float = 1.0
    min_p: float = 0.0
    min_len: int = 0
    forbid_eos: bool = False


def generate_left_to_right(
    model: CausalModel,
    canvas: Canvas,
    specials: Specials,
    how: LeftToRight,
    *,
    num_layers: int,
    seeds: Sequence[int],
    stop: Stop | None = None,
    on_pass: Callable[[Pass], None] | None = None,
) -> Generation:
    """Fill `canvas`, whose rows are given ids and then one gap up to their end.

    n tokens cost n passes: the first reads the given ids, the others one token each. Behind an EOS,
    and behind what `stop` calls an end, a row holds EOS to its end and is not read again; when all
    rows have ended, no further pass is made. `model` is in eval mode and on the canvas's device.
    The trajectory is kept only for `on_pass`. Raises UserError for other canvases and for logits
    that are not finite.
    """
    given, wanted = _given_lengths(canvas), canvas.num_fillable.cpu().numpy()
    rng = _Draws(canvas, specials, how, seeds, ("autoregressive",))
    ids, confidence = canvas.ids.clone(), torch.zeros(canvas.ids.shape, device=canvas.ids.device)
    reader = _Reader(model, num_layers, canvas)
    drawn, none = torch.zeros_like(canvas.fillable), torch.zeros_like(canvas.fillable)
    trajectory: list[Pass] = []
    alive, row_passes = np.ones(len(given), dtype=bool), np.zeros_like(wanted)
    k = 0
    with torch.inference_mode():
        while (alive := alive & (k < wanted)).any():
            reads = np.flatnonzero(alive)
            logits = reader.read(ids, reads, given[reads] + k)
            rows, at = (tell(x, ids.device) for x in (reads, given[reads] + k))
            tokens, sure = rng.draw(logits, rows, at, may_end=k >= how.min_len)
            previous, before = ids, drawn
            ids, confidence, drawn = ids.clone(), confidence.clone(), drawn.clone()
            ids[rows, at], confidence[rows, at], drawn[rows, at] = tokens, sure, True
            k, row_passes = k + 1, row_passes + alive
            if not how.forbid_eos:
                ended = tokens == specials.eos_id
                _end_rows(ids, canvas, rows[ended], at[ended], specials.eos_id)
                alive[rows[ended].cpu().numpy()] = False
            if stop is not None:
                over = [b for b in np.flatnonzero(alive) if stop(_written(ids[b], given[b], k))]
                stopped = torch.tensor(over, dtype=torch.int64, device=ids.device)
                at = tell((given + k)[over], ids.device)
                _end_rows(ids, canvas, stopped, at, specials.eos_id)
                alive[over] = False
            if on_pass is not None:
                accepted, ended = drawn & ~before, canvas.fillable & (ids != canvas.ids) & ~drawn
                now = (ids, confidence, accepted, none, previous)
                done = Pass(canvas, 0, k - 1, 0, *now, ended=ended)
                trajectory.append(done)
                on_pass(done)
    _require_finite(confidence, reader.dtype)
    passes = torch.from_numpy(row_passes)
    return Generation(ids, confidence, k, trajectory, passes, reader.num_positions)


def repair_left_to_right(
    model: CausalModel,
    draft: Generation,
    canvas: Canvas,
    specials: Specials,
    how: LeftToRight,
    *,
    num_layers: int,
    seeds: Sequence[int],
    num_rounds: int,
    fraction: float,
) -> Generation:
    """`draft` of another model, its least sure tokens drawn anew by the causal `model`.

    Each round takes the `fraction` of the fillable positions with the lowest confidence, from left
    to right, and replaces each by a sample given all that now stands to its left; what follows is
    not seen. A replaced token's confidence is its log-probability here. The passes are counted on
    top of the draft's: one for every position of the row that has most.
    """
    ids, confidence, num_passes = draft.ids, draft.confidence, draft.num_forward_passes
    row_passes, num_positions = draft.row_passes, draft.num_positions
    quota = (fraction * canvas.num_fillable.double()).round().long().clamp(min=1)
    with torch.inference_mode():
        for r in range(num_rounds):
            rng = _Draws(canvas, specials, how, seeds, ("autoregressive repair", r))
            chosen = choose(-confidence, canvas.fillable, quota, 1)
            row_passes = row_passes + chosen.sum(dim=1).to(row_passes.device)
            places = [np.flatnonzero(row) for row in chosen.cpu().numpy()]
            reader = _Reader(model, num_layers, canvas)
            ids, confidence = ids.clone(), confidence.clone()
            for j in range(max(map(len, places))):
                reads = np.flatnonzero([j < len(row) for row in places])
                ends = np.array([places[b][j] for b in reads])
                logits = reader.read(ids, reads, ends)
                rows, at = (tell(x, ids.device) for x in (reads, ends))
                ids[rows, at], confidence[rows, at] = rng.draw(logits, rows, at, may_end=True)
                num_passes += 1
            _require_finite(confidence, reader.dtype)
            num_positions += reader.num_positions
    return Generation(ids, confidence, num_passes, [], row_passes, num_positions)


class _Reader:
    """Reads the rows of a canvas on and on; a row that is left out once has left the batch."""

    def __init__(self, model: CausalModel, num_layers: int, canvas: Canvas) -> None:
        B, T = canvas.ids.shape
        self.model, self.cache, self.rows = model, KVCache(num_layers, B, T), np.arange(B)
        self.num_positions = 0
        self.dtype: torch.dtype | None = None
        """Of the logits of the call before."""

    def read(self, ids: Tensor, rows: Counts, ends: Counts) -> Tensor:
        """Read `rows` (N,) of `ids` (B, T) up to their `ends` (N,), each further than before;
        logits (N, V) of what comes next in them."""
        if len(rows) < len(self.rows):
            self.cache.keep(np.searchsorted(self.rows, rows))
            self.rows = rows
        starts = self.cache.lengths
        counts = ends - starts
        place = starts[:, None] + np.arange(counts.max())
        real = place < ends[:, None]
        self.num_positions += real.size
        place = tell(place.clip(max=ids.shape[1] - 1), ids.device)
        at = torch.zeros(real.shape, dtype=torch.bool)
        at[np.arange(len(rows)), counts - 1] = True
        doc_ids = None if real.all() else torch.from_numpy(real.astype(np.int32) - 1)
        index = tell(rows, ids.device)[:, None]
        logits = self.model(ids[index, place], doc_ids, at, self.cache)
        self.dtype = logits.dtype
        return logits


class _Draws:
    """One uniform for every position of every row, from the row's seed and `key`."""

    def __init__(
        self,
        canvas: Canvas,
        specials: Specials,
        how: LeftToRight,
        seeds: Sequence[int],
        key: tuple[int | str, ...],
    ) -> None:
        B, T = canvas.ids.shape
        if len(seeds) != B:
            raise UserError(f"{len(seeds)} seeds for {B} rows: give one seed per row")
        device = canvas.ids.device
        rows = np.stack([philox(seed, *key).random(T) for seed in seeds])
        self.uniform, self.how = torch.from_numpy(rows).to(device), how
        emittable = torch.as_tensor(specials.emittable, dtype=torch.bool)
        self.forbidden = (~emittable).nonzero().squeeze(1).to(device)
        self.specials = specials

    def draw(
        self, logits: Tensor, rows: Tensor, at: Tensor, *, may_end: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log p1 (N,) for position `at` of each of `rows` (N,) from logits (N, V)."""
        if logits.shape[1] != self.specials.vocab_size:
            raise UserError(
                f"the model knows {logits.shape[1]} ids, the tokenizer {self.specials.vocab_size}: "
                "use the tokenizer this model was trained with"
            )
        N, how, device = len(rows), self.how, logits.device
        no_eos = None
        if not may_end or how.forbid_eos:
            no_eos = torch.ones(N, dtype=torch.bool, device=device)
        places = Places(
            None,
            self.uniform[rows, at],
            torch.full((N,), how.temperature, device=device),
            no_eos,
        )
        rules = Rules(self.forbidden, self.specials.eos_id, how.min_p)
        drawn = sample(logits, places, rules, greedy=how.temperature == 0)
        return drawn.tokens, drawn.confidence


def _require_finite(confidence: Tensor, dtype: torch.dtype | None) -> None:
    """Once, at an end: a look at every pass would make the host wait for the device each time."""
    if not confidence.isfinite().all():
        raise not_finite("the model", dtype)


def _given_lengths(canvas: Canvas) -> Counts:
    """How many ids each row begins with, (B,)."""
    real, open_ = canvas.doc_ids.cpu().numpy() >= 0, canvas.fillable.cpu().numpy()
    given = real.sum(axis=1) - open_.sum(axis=1)
    place = np.arange(real.shape[1])
    if not open_.any() or (open_ != (real & (place >= given[:, None]))).any() or given.min() < 1:
        raise UserError(
            "a causal model only continues text: it cannot fill a gap with something behind it; "
            "use a denoiser (model.causal = false)"
        )
    return given


def _written(row: Tensor, given: int, k: int) -> list[int]:
    return row[given : given + k].tolist()


def _end_rows(ids: Tensor, canvas: Canvas, rows: Tensor, at: Tensor, eos_id: int) -> None:
    """Fill `rows` (N,) with EOS from position `at` (N,) to their ends."""
    place = torch.arange(ids.shape[1], device=ids.device)
    behind = canvas.fillable[rows] & (place >= at[:, None])
    ids[rows] = ids[rows].masked_fill(behind, eos_id)
