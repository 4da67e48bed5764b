"""Where a slot continues. A cursor is plain numbers and rides with the weights: whoever loads a
global continues where its lineage ended (spec data.md 5, design A)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diffurefill.data.formats.marks import Mark


class SourceCursor(NamedTuple):
    """Where a slot continues in a source: the next document nobody has trained on.

    `unit` counts in the epoch's order of the slot's units, `block` in the unit, `document` in the
    block's shuffled order; `start` is where the block begins. All start at 0.
    """

    epoch: int = 0
    unit: int = 0
    block: int = 0
    document: int = 0
    start: Mark = Mark()

    def to_json(self) -> list[int]:
        return [*self[:4], *self.start]

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> SourceCursor:
        epoch, unit, block, document, *start = map(int, record)
        return cls(epoch, unit, block, document, Mark(*start))


@dataclass(frozen=True)
class Cursor:
    """Where a slot continues: the next piece of text nobody has trained on.

    `num_drawn` documents are consumed, and `token` tokens of the next one.
    """

    num_drawn: int = 0
    token: int = 0
    sources: Mapping[str, SourceCursor] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        sources = {name: cursor.to_json() for name, cursor in sorted(self.sources.items())}
        return {"num_drawn": self.num_drawn, "token": self.token, "sources": sources}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Cursor:
        sources = {name: SourceCursor.from_json(c) for name, c in record["sources"].items()}
        return cls(int(record["num_drawn"]), int(record["token"]), sources)
