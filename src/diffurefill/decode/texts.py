"""What was written as people and programs want it: text, ids, how sure, after how many passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diffurefill.config import UserError
from diffurefill.decode.canvas import Canvas
from diffurefill.decode.endings import Stop
from diffurefill.decode.record import Generation

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class WrittenText:
    """One row of a generation."""

    text: str
    """With all that was given; cut where a generated text ends, before a stop text."""
    ids: list[int]
    """What was generated, gap after gap; up to EOS, or to the token that completes a stop text."""
    confidences: list[float]
    """The probability that the model gave to each of them."""
    num_passes: int
    """Passes that wrote in this row."""


@dataclass(frozen=True)
class Reader:
    """From ids to texts. `decode` is of a whole row, `inner` of ids from inside a text."""

    decode: Decode
    inner: Decode
    eos_id: int
    stop: tuple[str, ...] = ()

    def rule(self) -> Stop | None:
        """For the decoder: whether a stop text stands in what was generated."""
        if "" in self.stop:
            raise UserError("an empty stop text would end every text at once: name some characters")
        return (lambda ids: self._stands(ids) is not None) if self.stop else None

    def texts(self, canvas: Canvas, done: Generation) -> list[WrittenText]:
        """Every row, in order."""
        confidence = done.confidence.exp()
        return [
            self._text(
                row[real].tolist(), fillable[real].tolist(), sure[fillable].tolist(), num_passes
            )
            for row, real, fillable, sure, num_passes in zip(
                done.ids.cpu(),
                canvas.doc_ids.cpu() >= 0,
                canvas.fillable.cpu(),
                confidence.cpu(),
                done.row_passes.tolist(),
                strict=True,
            )
        ]

    def _text(
        self, row: list[int], fillable: list[bool], sure: list[float], num_passes: int
    ) -> WrittenText:
        start = last_given(fillable)
        tail, behind = row[start:], 0  # `behind`: characters from the stop text on
        if self.eos_id in tail:
            tail = tail[: tail.index(self.eos_id)]
        stands = self._stands(tail) if self.stop else None
        if stands is not None:
            while self._stands(tail[:-1]) is not None:
                tail = tail[:-1]
            behind = len(self.inner(tail)) - stands
        ids = [token for token, open_ in zip(row[:start], fillable, strict=False) if open_] + tail
        text = self.decode(row[:start] + tail)
        text = text[: max(0, len(text) - behind)]
        return WrittenText(text=text, ids=ids, confidences=sure[: len(ids)], num_passes=num_passes)

    def _stands(self, ids: Sequence[int]) -> int | None:
        """Where the first stop text begins in the text of `ids`."""
        text = self.inner(list(ids))
        found = [at for at in map(text.find, self.stop) if at >= 0]
        return min(found, default=None)


def last_given(fillable: Sequence[bool]) -> int:
    """Where the open end of a row of `fillable` begins: its length where it ends on a given id."""
    start = len(fillable)
    while start > 0 and fillable[start - 1]:
        start -= 1
    return start
