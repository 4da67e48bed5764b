"""Collocations: word sequences that occur together more than their parts explain (PMI masking).

A list of n-grams of two to five words: half bigrams, a quarter trigrams, an eighth each of four and
of five words, the best of every length by pointwise mutual information over the worst way to part
them. It says which words of a text are masked as one; its bigrams can become phrase tokens.
Words are compared as written: "United States" and "united states" are different entries.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from diffurefill.config import UserError
from diffurefill.data.spans.ngrams import (
    MAX_ORDER,
    RUN,
    WORD,
    KeyCounts,
    NgramCounts,
    count_ngrams,
)
from diffurefill.data.storage.files import read_whole
from diffurefill.runtime import philox

ONE_IN = {2: 2, 3: 4, 4: 8, 5: 8}
"""Words of an entry -> one in how many entries of a list are of that length."""
_MAGIC = "# diffurefill collocations "

Range = tuple[int, int]


@dataclass(frozen=True)
class Collocations:
    entries: tuple[str, ...]
    """Words with one space between them, the best of every length first."""
    facts: dict[str, Any]
    """How the list was made: `size`, `min_count`, `squared`, `num_words` and `coverage` of the text
    it was made from, and `lost` (NgramCounts)."""

    def save(self, path: str | Path) -> None:
        """One entry a line, below a line with the facts."""
        lines = [_MAGIC + json.dumps(self.facts), *self.entries]
        Path(path).write_text("\n".join(lines) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Collocations:
        """The list at `path`, which may be any file that a data source may be.

        Raises UserError where it is no such list.
        """
        try:
            first, *entries = read_whole(str(path)).decode().splitlines()
            if not first.startswith(_MAGIC):
                raise ValueError("its first line is not that of such a list")
            facts = json.loads(first.removeprefix(_MAGIC))
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read the list of collocations {path}: {error}; make one with "
                "`diffurefill data collocations`"
            ) from None
        for number, entry in enumerate(entries, start=2):
            words = entry.split(" ")
            if not (2 <= len(words) <= MAX_ORDER and all(map(WORD.fullmatch, words))):
                raise UserError(f"{path}:{number}: {entry!r} is not two to five words")
        return cls(tuple(entries), facts)

    def find_spans(self, text: str) -> list[Range]:
        """Character ranges of entries in `text`, sorted and disjoint.

        An entry inside a longer one gives way to it. Of entries that overlap otherwise, a random
        order decides that depends on the text alone; what the losers leave uncovered is looked at
        again, so that no entry of the list lies wholly outside the spans.
        """
        draw = _Draw(text)
        spans = []
        for run in RUN.finditer(text):
            found = self._occurrences(run.group().split())
            if found:
                words = [word.span() for word in WORD.finditer(text, *run.span())]
                chosen = _resolve(found, len(words), draw)
                spans += [(words[a][0], words[b - 1][1]) for a, b in chosen]
        return spans

    def coverage(self, texts: Iterable[str]) -> float:
        """The share of words that lie in an entry, before overlaps are resolved."""
        num_words = num_inside = 0
        for text in texts:
            for run in RUN.findall(text):
                words = run.split()
                num_words += len(words)
                inside = {i for a, b in self._occurrences(words) for i in range(a, b)}
                num_inside += len(inside)
        return num_inside / num_words if num_words else 0.0

    def bigrams(self, count: int) -> list[str]:
        """The best `count` entries of two words: what phrase tokens are made of."""
        return list(islice((entry for entry in self.entries if entry.count(" ") == 1), count))

    def _occurrences(self, words: Sequence[str]) -> list[Range]:
        """Ranges of `words` that are entries, in order of their start."""
        known, found = self._known, []
        for start in range(len(words) - 1):
            sequence = words[start]
            for last in range(start + 1, min(start + MAX_ORDER, len(words))):
                sequence = f"{sequence} {words[last]}"
                is_entry = known.get(sequence)
                if is_entry is None:
                    break
                if is_entry:
                    found.append((start, last + 1))
        return found

    @cached_property
    def _known(self) -> dict[str, bool]:
        """Every entry, and every beginning of one with False."""
        known: dict[str, bool] = {}
        for entry in self.entries:
            at = entry.find(" ")
            while (at := entry.find(" ", at + 1)) >= 0:
                known.setdefault(entry[:at], False)
            known[entry] = True
        return known


def build_collocations(
    texts: Iterable[str],
    *,
    size: int | None = None,
    coverage: float | None = None,
    min_count: int = 10,
    squared: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Collocations:
    """A list of `size` entries, or the smallest that covers `coverage` of the words of `texts`.

    Entries occur more than `min_count` times. `squared` ranks by log p(w)^2 instead of log p(w):
    the form that the published lists use, in which frequent sequences come first. A list is shorter
    than `size` where the text has too few sequences of some length. The same texts in the same
    order give the same list. Raises UserError where there is nothing to list, or too little.
    """
    if (size is None) == (coverage is None):
        raise UserError("give either a size of the list or the coverage it is to reach")
    if size is not None and size < max(ONE_IN.values()):
        raise UserError(f"a list of {size} has no room: ask for at least {max(ONE_IN.values())}")
    if coverage is not None and not 0.0 < coverage < 1.0:
        raise UserError(f"a coverage of {coverage:g} makes no sense: it lies between 0 and 1")
    orders = range(2, MAX_ORDER + 1)
    with tempfile.TemporaryFile() as file:
        counts = count_ngrams(texts, min_count, file, report=report)
        report("ranking")
        needs = {n: _list_sizes(counts, n, squared=squared) for n in orders}
        covered = _covered_from_size(counts, needs)
    if not any(len(need) for need in needs.values()):
        raise UserError(
            f"no two words stand together more than {min_count} times: give more text or a lower "
            "min_count"
        )
    if size is None:
        size = _smallest_size(coverage or 0.0, covered, counts)
    entries = [entry for n in orders for entry in _entries(counts, n, needs[n], size)]
    num_words = counts.levels[0].total
    num_inside = int(covered.counts[covered.keys <= size].sum())
    facts = {
        "size": size,
        "min_count": min_count,
        "squared": squared,
        "num_words": num_words,
        "coverage": num_inside / num_words,
        "lost": counts.lost,
    }
    ranked = sorted(entries, key=lambda entry: entry[:2])
    return Collocations(tuple(words for _, _, words in ranked), facts)


# --- ranking -------------------------------------------------------------------------------------


def _list_sizes(counts: NgramCounts, order: int, *, squared: bool) -> np.ndarray:
    """int64 (m,): for every frequent n-gram the size of the smallest list that it is in."""
    scores = counts.scores(order, squared=squared)
    level = counts.levels[order - 1]
    best_first = np.lexsort([level.keys, -level.counts, -scores])
    needs = np.empty(len(scores), dtype=np.int64)
    needs[best_first] = (np.arange(len(scores)) + 1) * ONE_IN[order]
    return needs


def _covered_from_size(counts: NgramCounts, needs: dict[int, np.ndarray]) -> KeyCounts:
    """List sizes, and how many words lie in an entry from a list of that size on, no smaller."""
    never = np.iinfo(np.int64).max
    covered = KeyCounts(sum(map(len, needs.values())))
    for words, _ in counts.file.blocks():
        need_here = np.full(len(words), never)
        for order, need in needs.items():
            grams = counts.ids(words, order)
            starts = np.flatnonzero(grams >= 0)
            for places in (starts + offset for offset in range(order)):
                need_here[places] = np.minimum(need_here[places], need[grams[starts]])
        covered.add(need_here[need_here < never])
    return covered


def _smallest_size(coverage: float, covered: KeyCounts, counts: NgramCounts) -> int:
    share = np.cumsum(covered.counts) / counts.levels[0].total
    place = int(np.searchsorted(share, coverage))
    if place == len(share):
        raise UserError(
            f"all frequent word sequences together cover {share[-1]:.3f} of the words, not "
            f"{coverage:g}: ask for less, or lower min_count"
        )
    return int(covered.keys[place])


def _entries(
    counts: NgramCounts, order: int, needs: np.ndarray, size: int
) -> Iterator[tuple[int, int, str]]:
    """(size of the smallest list with it, number of words, entry) of those in a list of `size`."""
    chosen = np.flatnonzero(needs <= size)
    matrix = counts.word_matrix(order)[chosen]
    for need, row in zip(needs[chosen].tolist(), matrix.tolist(), strict=True):
        yield need, order, " ".join(counts.words[word] for word in row)


# --- overlaps ------------------------------------------------------------------------------------


class _Draw:
    """Random orders that depend on a text; made only if entries overlap."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def generator(self) -> np.random.Generator:
        return philox("collocations", self._text)


def _resolve(found: list[Range], num_words: int, draw: _Draw) -> list[Range]:
    """Disjoint ranges such that every one of `found` overlaps a chosen one; both are sorted."""
    chosen: list[Range] = []
    is_taken = bytearray(num_words)
    while found:
        longest = _longest(found)
        if any(one[1] > other[0] for one, other in pairwise(longest)):
            longest = [longest[i] for i in draw.generator.permutation(len(longest))]
        for start, end in longest:
            if not any(is_taken[start:end]):
                chosen.append((start, end))
                is_taken[start:end] = b"\1" * (end - start)
        found = [(start, end) for start, end in found if not any(is_taken[start:end])]
    return sorted(chosen)


def _longest(found: list[Range]) -> list[Range]:
    """Those of `found` that lie in no other."""
    kept: list[Range] = []
    for start, end in sorted(found, key=lambda r: (r[0], -r[1])):
        if not kept or end > kept[-1][1]:
            kept.append((start, end))
    return kept
