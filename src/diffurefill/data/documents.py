"""Documents: the corpus, the held-out split, the slots, and the order in which a slot reads.

Everything here is a pure function of the corpus, the seed and a cursor: a worker that starts
anywhere continues exactly where the slot's last merged contribution ended (spec data.md 5, A).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diffurefill.config import UserError
from diffurefill.data.sources import Unit, list_units, read_texts
from diffurefill.runtime import philox

_UNITS_PER_SLOT = 4
"""From so many units a slot on, slots share units out; below it, they share documents out."""
_BLOCK_DOCUMENTS = 1_024
_BLOCK_CHARS = 8_000_000
"""A shuffled block ends at whichever comes first: long documents must not fill the memory."""


@dataclass(frozen=True)
class Corpus:
    units: tuple[Unit, ...]
    text_column: str

    @property
    def fingerprint(self) -> str:
        """sha256 hex over what the units are, not where: a worker refuses a corpus that differs."""
        facts = [[unit.name, unit.size_bytes, unit.row_group] for unit in self.units]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def texts(self, unit: int) -> Iterator[str]:
        """The documents of unit number `unit`, in the file's order, as a stream."""
        return read_texts(self.units[unit], self.text_column)


def open_corpus(sources: Sequence[str], text_column: str) -> Corpus:
    """The corpus that `sources` name; raises UserError where one is unreadable or all are empty."""
    try:
        listed = [unit for source in sources for unit in list_units(source, text_column)]
        # A file named by two sources is still one file: its documents must not come twice.
        units = {(unit.path.resolve(), unit.row_group): unit for unit in listed}
        corpus = Corpus(tuple(units.values()), text_column)
        empty = all(next(corpus.texts(unit), None) is None for unit in range(len(units)))
    except OSError as error:
        raise UserError(f"cannot read a data source: {error}") from None
    if empty:
        raise UserError(f"no text in {', '.join(sources)}: name sources that hold documents")
    return corpus


def is_held_out(text: str, fraction: float) -> bool:
    """Whether no worker may ever read this document: decided by its sha256 alone.

    The one place that splits. Equal texts fall on the same side, wherever and however often they
    stand.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@dataclass(frozen=True)
class Cursor:
    """Where a slot continues: the next piece of text nobody has trained on.

    `unit` counts in the epoch's order of the slot's units, `document` in that unit's shuffled
    order, `piece` in the document's pieces (packing); all start at 0.
    """

    epoch: int = 0
    unit: int = 0
    document: int = 0
    piece: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Cursor:
        return cls(**{name: int(record[name]) for name in ("epoch", "unit", "document", "piece")})


def read_documents(
    corpus: Corpus,
    *,
    seed: int,
    slot: int,
    num_slots: int,
    cursor: Cursor,
    held_out_fraction: float,
) -> Iterator[tuple[str, Cursor]]:
    """The slot's training documents from `cursor` on, epoch after epoch, without end.

    Each comes with the cursor right after it. A slot owns the same documents in every epoch: no
    two slots share one, and together they own all. Raises UserError where the slot owns none.
    """
    if not 0 <= slot < num_slots:
        raise UserError(f"slot {slot} does not exist: data.num_slots is {num_slots}")
    share = _Share(corpus, seed, slot, num_slots, held_out_fraction)
    epoch, first, skip = cursor.epoch, cursor.unit, cursor.document
    while True:
        is_whole, num_read = first == skip == 0, 0
        order = philox(seed, "units", slot, epoch).permutation(share.units)
        for place in range(first, len(order)):
            unit = int(order[place])
            key = (seed, "documents", unit, epoch)
            for document, text in _shuffled(share.texts(unit), skip, key):
                num_read += 1
                yield text, Cursor(epoch, place, document + 1)
            skip = 0
        if is_whole and num_read == 0:
            raise UserError(
                f"slot {slot} of {num_slots} has no document to train on: lower data.num_slots or "
                "add text to data.sources"
            )
        epoch, first, skip = epoch + 1, 0, 0


class _Share:
    """What one slot owns: whole units where there are many, else every num_slots-th document.

    Ownership does not depend on the epoch, so slots that stand in different epochs stay disjoint.
    """

    def __init__(
        self, corpus: Corpus, seed: int, slot: int, num_slots: int, held_out_fraction: float
    ) -> None:
        self.corpus = corpus
        self.held_out_fraction = held_out_fraction
        self.slot, self.num_slots = slot, num_slots
        num_units = len(corpus.units)
        self.by_unit = num_units >= _UNITS_PER_SLOT * num_slots
        ranked = philox(seed, "owners").permutation(num_units)
        self.units = [int(unit) for unit in (ranked[slot::num_slots] if self.by_unit else ranked)]

    def texts(self, unit: int) -> Iterator[str]:
        """The slot's training documents in unit number `unit`, in the file's order."""
        for index, text in enumerate(self.corpus.texts(unit)):
            # The unit's number is added, or slot 0 would own every file of a single document.
            mine = self.by_unit or (unit + index) % self.num_slots == self.slot
            if mine and not is_held_out(text, self.held_out_fraction):
                yield text


def _shuffled(
    texts: Iterable[str], skip: int, key: tuple[int | str, ...]
) -> Iterator[tuple[int, str]]:
    """(place, text) of the texts shuffled in blocks, from place `skip` on.

    Resuming reads the block again; there is no shuffle buffer to save.
    """
    start = 0
    for number, block in enumerate(_blocks(texts)):
        end = start + len(block)
        order = philox(*key, number).permutation(len(block))
        for place in range(max(start, skip), end):
            yield place, block[order[place - start]]
        start = end


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    num_chars = 0
    for text in texts:
        block.append(text)
        num_chars += len(text)
        if len(block) == _BLOCK_DOCUMENTS or num_chars >= _BLOCK_CHARS:
            yield block
            block, num_chars = [], 0
    if block:
        yield block


def held_out_documents(corpus: Corpus, fraction: float) -> Iterator[str]:
    """All held-out documents, once. Units come in a fixed random order: any start is a sample.

    Raises UserError at the end where there was none.
    """
    num_documents = 0
    for unit in philox("held out").permutation(len(corpus.units)):
        for text in corpus.texts(int(unit)):
            if is_held_out(text, fraction):
                num_documents += 1
                yield text
    if num_documents == 0:
        raise UserError("no document is held out: raise data.held_out_fraction or add text")


def training_texts(corpus: Corpus, fraction: float, max_chars: int) -> Iterator[str]:
    """A fixed sample of up to `max_chars` characters to train a tokenizer on, none held out.

    Each unit gives at most an equal share of what is still wanted, so no unit crowds out the rest
    and only the start of a large one is read.
    """
    order = philox("training texts").permutation(len(corpus.units))
    wanted = max_chars
    for place, unit in enumerate(order):
        left = wanted // (len(order) - place)
        for text in corpus.texts(int(unit)):
            if left <= 0:
                break
            if not is_held_out(text, fraction):
                yield text[:left]
                wanted -= min(left, len(text))
                left -= len(text)
