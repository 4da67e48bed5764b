"""Where a text ends: at a generated EOS, or where the caller's rule says so; and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.decode.canvas import Canvas, Specials

Stop = Callable[[list[int]], bool]
"""Whether a text is over, from its generated ids up to the first that is still masked."""


class Streamer(Protocol):
    """Who watches one row being written; the methods of transformers' streamers of text that is
    drafted first. Ids come as int64 (n,) on the CPU."""

    def put(self, value: Tensor) -> None:
        """Ids that will not change any more: the given ones first, then block by block."""

    def put_draft(self, value: Tensor) -> None:
        """Everything after what was put, as it stands after a pass; MASK where nothing does."""

    def end(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Endings:
    """When rows end early. Looks at ids on the host: for those who ask for it only."""

    canvas: Canvas
    specials: Specials
    at_eos: bool
    stop: Stop | None

    def ended(self, ids: Tensor) -> NDArray[np.bool_]:
        """(B,) bool: rows whose text, from its last given id to the first MASK, is over."""
        over = []
        for row, fillable in zip(ids.tolist(), self.canvas.fillable.tolist(), strict=True):
            start = len(row)
            while start > 0 and (fillable[start - 1] or row[start - 1] == self.specials.pad_id):
                start -= 1
            text = row[start:]
            masks = [i for i in (self.specials.mask_id, self.specials.pad_id) if i in text]
            text = text[: min((text.index(i) for i in masks), default=len(text))]
            before = self.specials.mask_id not in row[:start]
            eos = self.at_eos and self.specials.eos_id in text
            over.append(before and bool(text) and (eos or bool(self.stop and self.stop(text))))
        return np.array(over, dtype=np.bool_)


@dataclass(eq=False)
class Streaming:
    """Feeds a streamer from the single row of a canvas."""

    streamer: Streamer
    canvas: Canvas
    told: int = 0

    def given(self) -> None:
        self._put(self.canvas.ids, int(self.canvas.fillable[0].int().argmax()))

    def drafted(self, ids: Tensor) -> None:
        self.streamer.put_draft(ids[0, self.told :].cpu())

    def settled(self, ids: Tensor, region: Tensor) -> None:
        """`region` (1, T), the block just finished, changes no more."""
        last = int(region[0].nonzero().max()) + 1
        behind = self.canvas.fillable[0, last:]
        following = int(behind.int().argmax()) if bool(behind.any()) else len(behind)
        self._put(ids, last + following)

    def _put(self, ids: Tensor, stop: int) -> None:
        if stop > self.told:
            self.streamer.put(ids[0, self.told : stop].cpu())
            self.told = stop
