"""Which source the n-th document of a slot comes from: a function of (seed, slot, n) and the
shares in force. What has been drawn of each source is the cursor, which travels with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from diffurefill.config import DataConfig, Shares, UserError
from diffurefill.data.cursors import Cursor, SourceCursor
from diffurefill.data.documents import Corpus
from diffurefill.data.slots import Slot, is_shared_by_unit, read_source
from diffurefill.runtime import philox

_DRAWS = 256
"""Draws that one generator serves: making a generator costs as much as a hundred draws."""


class Document(NamedTuple):
    """A text and the cursors right before and after it."""

    text: str
    source: str
    before: Cursor
    after: Cursor


def read_documents(
    corpus: Corpus, shares: Shares, slot: Slot, cursor: Cursor
) -> Iterator[Document]:
    """The slot's documents from `cursor` on, drawn by `shares`, without end."""
    streams: dict[str, Iterator[tuple[str, SourceCursor]]] = {}
    before = replace(cursor, token=0)
    while True:
        name = source_of_draw(shares, slot, before.num_drawn)
        if name not in streams:
            at = before.sources.get(name, SourceCursor())
            streams[name] = read_source(corpus.sources[name], slot, at, corpus.is_held_out)
        text, at = next(streams[name])
        after = Cursor(before.num_drawn + 1, 0, {**before.sources, name: at})
        # Of the first document, the cursor may have left some tokens only.
        is_first = before.num_drawn == cursor.num_drawn
        yield Document(text, name, cursor if is_first else before, after)
        before = after


def source_of_draw(shares: Shares, slot: Slot, num_drawn: int) -> str:
    """The source of the slot's document number `num_drawn`; one without share is never drawn."""
    bounds = np.cumsum([share for _, share in shares])
    draw = _draws(slot, num_drawn // _DRAWS)[num_drawn % _DRAWS] * bounds[-1]
    return shares[int(np.searchsorted(bounds, draw, side="right"))][0]


@lru_cache(maxsize=64)
def _draws(slot: Slot, block: int) -> np.ndarray:
    return philox(slot.seed, "mixture", slot.number, block).random(_DRAWS)


def require_every_slot(corpus: Corpus, data: DataConfig, seed: int) -> None:
    """UserError now, rather than at the start of the worker whose slot has no document.

    Sources that are shared out by whole units have some for everyone; only the others are tried.
    """
    for source in corpus.sources.values():
        if is_shared_by_unit(len(source.units), data.num_slots):
            continue
        for number in range(data.num_slots):
            slot = Slot(number, data.num_slots, seed)
            next(read_source(source, slot, SourceCursor(), corpus.is_held_out))


def slot_of(data: DataConfig, number: int, seed: int) -> Slot:
    """Raises UserError where the run has no such slot."""
    if not 0 <= number < data.num_slots:
        raise UserError(f"slot {number} does not exist: data.num_slots is {data.num_slots}")
    return Slot(number, data.num_slots, seed)
