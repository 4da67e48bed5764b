"""Phrase tokens: new ids that stand for whole sequences of a tokenizer's ids.

They lie above the tokenizer's own. Encoding replaces greedily from the left, the longest phrase
first; expanding gives the same ids back, whatever was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Ids = tuple[int, ...]


class PhraseTable:
    """Phrases as sequences of at least two ids, none twice; the n-th has the id first_id + n."""

    def __init__(self, sequences: Sequence[Ids], first_id: int) -> None:
        self.sequences = list(sequences)
        self.first_id = first_id
        self._ids = {sequence: first_id + n for n, sequence in enumerate(self.sequences)}
        assert len(self._ids) == len(self.sequences)
        assert all(len(sequence) >= 2 for sequence in self.sequences)
        self._lengths = sorted({len(sequence) for sequence in self.sequences}, reverse=True)
        starts = {self._pair(*sequence[:2]) for sequence in self.sequences}
        self._starts = np.array(sorted(starts), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sequences)

    def replace(self, ids: list[int]) -> list[int]:
        """`ids` with every phrase in them as one id."""
        replaced: list[int] = []
        done = 0
        for at in self._candidates(ids):
            if at < done:
                continue
            for length in self._lengths:
                phrase = self._ids.get(tuple(ids[at : at + length]))
                if phrase is not None:
                    replaced += ids[done:at]
                    replaced.append(phrase)
                    done = at + length
                    break
        replaced += ids[done:]
        return replaced

    def expand(self, ids: Sequence[int]) -> list[int]:
        """The tokenizer's own ids; what is no phrase stays."""
        own: list[int] = []
        for token in ids:
            place = token - self.first_id
            if 0 <= place < len(self.sequences):
                own += self.sequences[place]
            else:
                own.append(token)
        return own

    def _candidates(self, ids: list[int]) -> list[int]:
        """Places whose two ids begin some phrase: a few of many, found without a loop."""
        if len(ids) < 2 or not len(self._starts):
            return []
        row = np.asarray(ids, dtype=np.int64)
        pairs = row[:-1] * self.first_id + row[1:]
        place = np.searchsorted(self._starts, pairs)
        found = self._starts[np.minimum(place, len(self._starts) - 1)] == pairs
        return np.flatnonzero(found).tolist()

    def _pair(self, first: int, second: int) -> int:
        return first * self.first_id + second
