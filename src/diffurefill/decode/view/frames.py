"""What every viewer shows: one row of a trajectory as plain data, a frame for each pass.

`frames(generation.trajectory, tokenizer.decode_inner)` gives strings and numbers only; terminal.py,
page.py and gif.py draw them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

from diffurefill.decode.record import Pass

Decode = Callable[[Sequence[int]], str]
"""Text of ids that stand inside a document; specials are nothing."""

LEVELS = (0.1, 0.3, 0.6, 0.9)
"""Probabilities that part the five colours, from least to most sure."""
SPECIAL = "<eos>"
"""Shown for a written token without text: no other special is ever written."""
MAX_TITLE = 60
STEERING = "\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Line and paragraph ends, and what turns the direction of the text around it."""


@dataclass(frozen=True)
class Cell:
    """One position after a pass. `probability` is 1 where nothing was written."""

    kind: Literal["given", "masked", "standing", "accepted", "refilled", "ended"]
    """Accepted and refilled: in this very pass. Ended: behind the end of the text."""
    text: str
    """Empty while masked, and behind the first piece of a character that took several."""
    probability: float = 1.0
    old: str | None = None
    """What a refill replaced, where it differs."""

    @property
    def level(self) -> int:
        """0 to 4, an index into the colours."""
        return sum(self.probability >= step for step in LEVELS)


@dataclass(frozen=True)
class Frame:
    """One row as one pass left it, without padding."""

    stage: Literal["draft", "refill"]
    number: str
    """`3/12`, or `3` where a stage takes as many passes as it needs; `3/12 of block 2`."""
    cells: tuple[Cell, ...]

    @property
    def num_masked(self) -> int:
        return self._count("masked")

    @property
    def num_fillable(self) -> int:
        return len(self.cells) - self._count("given")

    @property
    def num_redone(self) -> int:
        return self._count("refilled")

    @property
    def num_changed(self) -> int:
        return sum(cell.old is not None for cell in self.cells)

    @property
    def mean_confidence(self) -> float:
        """Mean probability of the tokens written so far; 0 before there is one."""
        unwritten = ("given", "masked", "ended")
        sure = [c.probability for c in self.cells if c.kind not in unwritten]
        return sum(sure) / len(sure) if sure else 0.0

    @property
    def summary(self) -> str:
        """`draft 3/12: 30 of 128 filled`, or `refill 2/8: 25 redone, 14 changed`."""
        if self.stage == "refill":
            done = f"{self.num_redone} redone, {self.num_changed} changed"
        else:
            done = f"{self.num_fillable - self.num_masked} of {self.num_fillable} filled"
        return f"{self.stage} {self.number}: {done}"

    def _count(self, kind: str) -> int:
        return sum(cell.kind == kind for cell in self.cells)


def frames(trajectory: Iterable[Pass], decode: Decode, row: int = 0) -> list[Frame]:
    """Row `row` of every pass."""

    def text_of(ids: Sequence[int]) -> str:
        return printable(decode(ids))

    one = functools.cache(lambda token: text_of([token]))
    return [_frame(record, row, text_of, one) for record in trajectory]


def title(shown: Sequence[Frame]) -> str:
    """What was given, with dots for each gap: `Once upon a time ...`."""
    parts = [
        "".join(cell.text for cell in run) if given else " ... "
        for given, run in groupby(shown[-1].cells, key=lambda cell: cell.kind == "given")
    ]
    text = " ".join("".join(parts).split())
    return text if len(text) <= MAX_TITLE else text[: MAX_TITLE - 4].rstrip(" .") + " ..."


def printable(text: str) -> str:
    """Control characters as pictures of themselves, so that no token can steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else
        "\ufffd" if 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 or c in STEERING else
        c
        for c in text
    )  # fmt: skip


def _frame(record: Pass, row: int, decode: Decode, one: Callable[[int], str]) -> Frame:
    columns = (
        record.ids,
        record.confidence,
        record.canvas.fillable,
        record.is_masked,
        record.accepted,
        record.remasked,
        record.previous_ids,
        torch.zeros_like(record.accepted) if record.ended is None else record.ended,
    )
    real = record.canvas.doc_ids[row] >= 0
    ids, confidence, fillable, masked, accepted, remasked, old, ended = (
        column[row][real].tolist() for column in columns
    )
    texts = _texts(ids, masked, decode, one)
    cells = []
    for i in range(len(ids)):
        if masked[i]:
            cells.append(Cell("masked", ""))
        elif not fillable[i]:
            cells.append(Cell("given", texts[i] or ""))
        elif ended[i]:
            cells.append(Cell("ended", SPECIAL))
        else:
            kind = "refilled" if remasked[i] else "accepted" if accepted[i] else "standing"
            replaced = _shown(one(old[i])) if remasked[i] and old[i] != ids[i] else None
            cells.append(Cell(kind, _shown(texts[i]), math.exp(confidence[i]), replaced))
    number = f"{record.index + 1}" + (f"/{record.num_passes}" if record.num_passes else "")
    number += f" of block {record.block + 1}" if record.block else ""
    return Frame("refill" if record.remasked.any() else "draft", number, tuple(cells))


def _texts(
    ids: list[int], masked: list[bool], decode: Decode, one: Callable[[int], str]
) -> list[str | None]:
    """The text of each position; neighbours that only together are a character share it: the first
    has the text, the others None."""
    texts: list[str | None] = [None if m else one(i) for i, m in zip(ids, masked, strict=True)]
    broken = [text is not None and "\ufffd" in text for text in texts]
    for is_broken, run in groupby(range(len(ids)), key=broken.__getitem__):
        places = list(run)
        if is_broken and len(places) > 1:
            whole = decode([ids[i] for i in places])
            if "\ufffd" not in whole:
                texts[places[0] : places[-1] + 1] = [whole, *[None] * (len(places) - 1)]
    return texts


def _shown(text: str | None) -> str:
    return "" if text is None else text or SPECIAL
