"""What all passes of one run share: the denoiser and what it cost, the canvas, random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.counts import Counts, Numbers, tell
from diffurefill.decode.sampling import Rules, beside
from diffurefill.decode.slots import Slots
from diffurefill.model.cached import RowCache, shadow_logits
from diffurefill.runtime import not_finite, philox

DRAWN_AHEAD = 4
"""Passes whose uniforms are drawn together: the first generator after a forward pass, which has
used the caches for itself, takes several times as long as the next ones."""


class Denoiser(Protocol):
    """What decoding asks of a model: logits (N, V) at the positions `at` (N,) of the B * T."""

    def __call__(
        self, canvas: Tensor, doc_ids: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class At:
    """Where in the plan a pass stands."""

    stage: int
    index: int
    block: int = 0


@dataclass(eq=False)
class Run:
    """What stays the same through all passes, and what they cost."""

    denoiser: Denoiser
    canvas: Canvas
    specials: Specials
    seeds: list[int]
    forbidden: Tensor
    """(F,) int64: ids that are never written."""
    no_eos: Tensor | None = None
    """(B, T) bool: where EOS is forbidden too."""
    num_forward_passes: int = 0
    num_positions: int = 0
    cache: RowCache | None = None
    """Keys and values of the stage's last passes, where it keeps them."""
    held: tuple[Tensor, int] = field(init=False)
    """Of which rows, (R,) int64, and how much of their width."""
    dtype: torch.dtype | None = None
    """Of the logits of the pass before."""
    drawn: dict[str, tuple[At, Tensor]] = field(default_factory=dict)
    """By use, the uniforms (DRAWN_AHEAD, B, T) of the passes from this one on."""
    beside: Tensor = field(init=False)
    """(B, T, 2), of `sampling.beside`."""
    num_fillable: Numbers = field(init=False)
    lengths: Numbers = field(init=False)
    """Of each row without the padding on its right."""
    rows_are_whole: bool = field(init=False)
    """Each row is one document without padding: attention then needs no mask, and nobody has to
    look for one in every pass."""

    def __post_init__(self) -> None:
        doc_ids = self.canvas.doc_ids
        self.beside = beside(doc_ids)
        self.confidence_sum = torch.zeros((), dtype=torch.float64, device=doc_ids.device)
        number = torch.arange(1, doc_ids.shape[1] + 1, device=doc_ids.device)
        lengths = ((doc_ids >= 0) * number).amax(dim=1)
        is_whole = ((doc_ids == doc_ids[:, :1]) & (doc_ids >= 0)).all(dim=1).long()
        facts = self.ask(torch.stack([self.canvas.num_fillable, lengths, is_whole]))
        self.num_fillable, self.lengths = facts[0], facts[1]
        self.rows_are_whole = bool(facts[2].all())

    def ask(self, numbers: Tensor) -> Numbers:
        """The content of `numbers` (int64), for which a GPU is waited for: all questions that the
        passes put to it in so many words. Raises UserError if a pass before was not finite."""
        answer = (
            torch.cat([numbers.flatten(), self.confidence_sum.isfinite().long()[None]])
            .cpu()
            .numpy()
        )
        if not answer[-1]:
            raise not_finite("the denoiser", self.dtype)
        return answer[:-1].reshape(numbers.shape)

    def note(self, confidence: Tensor) -> None:
        """Remember whether all is finite, until somebody asks: what is added up then is the sum."""
        self.confidence_sum = self.confidence_sum + confidence.sum(dtype=torch.float64)

    def check_finite(self) -> None:
        """Raises UserError if a pass was not."""
        self.ask(self.confidence_sum.new_zeros(0, dtype=torch.int64))

    def uniforms(self, use: str, at: At) -> Tensor:
        """(B, T) float64 in [0, 1). A longer row only draws further: padding changes nothing."""
        offset = at.index % DRAWN_AHEAD
        first = replace(at, index=at.index - offset)
        if use not in self.drawn or self.drawn[use][0] != first:
            T, block = self.canvas.ids.shape[1], ("block", at.block) if at.block else ()
            passes = [
                [
                    philox(seed, use, at.stage, first.index + k, *block).random(T)
                    for seed in self.seeds
                ]
                for k in range(DRAWN_AHEAD)
            ]
            self.drawn[use] = first, tell(np.array(passes), self.canvas.ids.device)
        return self.drawn[use][1][offset]

    def logits(self, seen: Tensor, slots: Slots) -> Tensor:
        """The denoiser's logits (N, V) at `slots`, N > 0.

        seen: (B, T), or whole batches of that one below the other. Rows without an open position
        are left out of the call, and columns that only they reach.
        """
        (B, T), at = seen.shape, slots.of
        copies = B // len(self.canvas.doc_ids)
        documents = None if self.rows_are_whole else self.canvas.doc_ids.repeat(copies, 1)
        has_open = slots.counts.high > 0
        if not has_open.all():
            width = int(np.tile(self.lengths, copies)[has_open].max())
            rows = tell(has_open.nonzero()[0], seen.device)
            row_among_these = tell(has_open.cumsum() - 1, seen.device)
            at = row_among_these[at // T] * width + at % T
            seen = seen[rows, :width]
            documents = None if documents is None else documents[rows, :width]
        return self._counted(self.denoiser(seen, documents, at), seen.numel())

    def rules_at(self, slots: Slots, copies: int = 1) -> tuple[Rules, Tensor | None]:
        """What may be written at slots of (copies * B, T): for `log_p_of`."""
        no_eos = None if self.no_eos is None else slots.read(self.no_eos.repeat(copies, 1))
        return Rules(self.forbidden, self.specials.eos_id), no_eos

    def kept_logits(self, seen: Tensor, open_: Tensor, *, full: bool) -> Tensor:
        """Logits (N, V) at the True positions of open_ (B, T), row-major, with keys and values of
        the passes before for what has not changed, but for a `full` pass. Asks the device once, in
        a full pass twice."""
        if full or self.cache is None:
            rows = self.ask(open_.any(dim=1).long()).nonzero()[0]
            # Rows without an open position are left out: within a stage none gets another one.
            self.held = tell(rows, seen.device), int(self.lengths[rows].max())
            self.cache = RowCache(self.denoiser)
        rows, width = self.held
        seen, open_, doc_ids = (x[rows, :width] for x in (seen, open_, self.canvas.doc_ids))
        compute = open_ | self.cache.changed(seen)
        num_open, num_computed = self.ask(torch.stack([open_.sum(dim=1), compute.sum(dim=1)]))
        at, most = Slots.at(open_, Counts.exactly(num_open)).of, int(num_computed.max())
        documents = None if self.rows_are_whole else doc_ids
        logits = self.cache.logits(seen, documents, compute, most, at)
        return self._counted(logits, len(seen) * most)

    def shadow_logits(
        self, seen: Tensor, open_: Tensor, judged: Tensor, num_judged: int
    ) -> tuple[Tensor, Tensor]:
        """Logits at the open positions, and of the shadows of the `judged` ones; all (B, T). Asks
        the device."""
        logits, shadows = shadow_logits(
            self.denoiser, seen, self.canvas.doc_ids, open_, judged, self.specials.mask_id
        )
        return self._counted(logits, seen.numel() + num_judged), shadows

    def _counted(self, logits: Tensor, num_positions: int) -> Tensor:
        self.num_forward_passes += 1
        self.num_positions += num_positions
        self.dtype = logits.dtype
        if logits.shape[1] != self.specials.vocab_size:
            raise UserError(
                f"the denoiser knows {logits.shape[1]} ids, the tokenizer "
                f"{self.specials.vocab_size}: use the tokenizer this model was trained with"
            )
        return logits
