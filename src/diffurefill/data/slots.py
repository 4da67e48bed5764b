"""The order in which a slot reads one source: epochs, units, and shuffled blocks.

A pure function of the source, the seed and a cursor: a worker that starts anywhere continues
exactly where the slot's last merged contribution ended (spec data.md 5, A).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from diffurefill.config import UserError
from diffurefill.data.cursors import SourceCursor
from diffurefill.data.documents import documents_of_row
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.rows import read_rows
from diffurefill.data.sources import UNITS_PER_SLOT, SourceText
from diffurefill.runtime import philox

BLOCK_DOCUMENTS = 1_024
BLOCK_CHARS = 8_000_000
"""A shuffled block ends at whichever comes first: long documents must not fill the memory."""


class Slot(NamedTuple):
    """One of a run's disjoint shares of the documents."""

    number: int
    num_slots: int
    seed: int


def read_source(
    source: SourceText,
    slot: Slot,
    cursor: SourceCursor,
    is_held_out: Callable[[str], bool],
) -> Iterator[tuple[str, SourceCursor]]:
    """The slot's training documents from `cursor` on, epoch after epoch, without end.

    Each comes with the cursor right after it. A slot owns the same documents in every epoch: no
    two slots share one, and together they own all. Raises UserError where the slot owns none.
    """
    share = _Share(source, slot, is_held_out)
    epoch, first, start = cursor.epoch, cursor.unit, cursor
    while True:
        is_whole, num_read = start == SourceCursor(epoch), 0
        order = philox(slot.seed, "units", source.name, slot.number, epoch).permutation(share.units)
        for place in range(first, len(order)):
            at = start if place == first else SourceCursor(epoch, place)
            for text, after in _read_unit(share, int(order[place]), at):
                num_read += 1
                yield text, after
        if is_whole and num_read == 0:
            raise UserError(
                f"slot {slot.number} of {slot.num_slots} finds no document to train on in the data "
                f"source {source.name!r}: lower data.num_slots or add text to it"
            )
        epoch, first = epoch + 1, 0
        start = SourceCursor(epoch)


class _Share:
    """What one slot owns: whole units where there are many, else every num_slots-th row.

    Ownership does not depend on the epoch, so slots that stand in different epochs stay disjoint.
    """

    def __init__(self, source: SourceText, slot: Slot, is_held_out: Callable[[str], bool]) -> None:
        self.source, self.slot, self._is_held_out = source, slot, is_held_out
        num_units = len(source.units)
        self.by_unit = is_shared_by_unit(num_units, slot.num_slots)
        ranked = philox(slot.seed, "owners", source.name).permutation(num_units)
        mine = ranked[slot.number :: slot.num_slots] if self.by_unit else ranked
        self.units = [int(unit) for unit in mine]

    def rows(self, unit: int, start: Mark) -> Iterator[tuple[list[str], Mark]]:
        """(training documents, mark after) of the slot's rows of a unit."""
        number, num_slots = self.slot.number, self.slot.num_slots
        at = start
        rows = read_rows(self.source.units[unit], self.source.source.text_column, start)
        for text, after in rows:
            # The unit's number is added, or slot 0 would own every file of a single document.
            if self.by_unit or (unit + at.row_group + at.row) % num_slots == number:
                documents = documents_of_row(text)
                yield [doc for doc in documents if not self._is_held_out(doc)], after
            at = after


def is_shared_by_unit(num_units: int, num_slots: int) -> bool:
    return num_units >= UNITS_PER_SLOT * num_slots


def _read_unit(
    share: _Share, unit: int, cursor: SourceCursor
) -> Iterator[tuple[str, SourceCursor]]:
    """The unit's documents shuffled in blocks, from the cursor on.

    Resuming reads the block again; there is no shuffle buffer to save.
    """
    slot, number, start, skip = share.slot, cursor.block, cursor.start, cursor.document
    for block, end in _blocks(share.rows(unit, start)):
        key = (slot.seed, "documents", share.source.name, unit, cursor.epoch, number)
        order = philox(*key).permutation(len(block))
        for place in range(skip, len(block)):
            after = cursor._replace(block=number, document=place + 1, start=start)
            if place == len(block) - 1:
                after = cursor._replace(block=number + 1, document=0, start=end)
            yield block[order[place]], after
        number, start, skip = number + 1, end, 0


def _blocks(rows: Iterator[tuple[list[str], Mark]]) -> Iterator[tuple[list[str], Mark]]:
    """(documents, mark after) of consecutive rows; a row is never split over two blocks."""
    block: list[str] = []
    num_chars, end = 0, Mark()
    for documents, after in rows:
        block += documents
        num_chars += sum(map(len, documents))
        end = after
        if len(block) >= BLOCK_DOCUMENTS or num_chars >= BLOCK_CHARS:
            yield block, end
            block, num_chars = [], 0
    if block:
        yield block, end
