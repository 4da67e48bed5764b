"""Counts of word n-grams (n = 1..5) in bounded memory, and how much their words belong together.

Words are written once, as numbers, to a temporary file of 4 bytes a word; every order n is then a
pass over that file. An n-gram is counted only if both (n-1)-grams in it are frequent, and its key
is made of the first one's number and its last word, so that no two n-grams share a key.

Memory: `MAX_WORDS` different words (some 150 bytes each), `MAX_NGRAMS` n-grams of one order (16
bytes each, twice while new ones are put between them), the frequent n-grams, one block of words.
Where a table outgrows its limit, its rarer half is forgotten: an n-gram may then be counted too low
by as much as `NgramCounts.lost`, never too high.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

MAX_ORDER = 5
MAX_WORDS = 1 << 21
MAX_NGRAMS = 1 << 23
_BLOCK_WORDS = 1 << 20
_BREAK = -1

_WORD = r"[^\W_]+(?:['\u2019-][^\W_]+)*"
_GAP = r"(?:[^\S\n]+(?:\n[^\S\n]*)?|\n[^\S\n]*)"
WORD = re.compile(_WORD)
"""Letters and digits, with apostrophes and hyphens inside. Words are compared as written."""
RUN = re.compile(f"{_WORD}(?:{_GAP}{_WORD})*")
"""Words with only blanks between them and at most one line break: n-grams do not cross its ends."""


@dataclass(frozen=True)
class Level:
    """The frequent n-grams of one order; an n-gram's id is its place."""

    keys: np.ndarray
    """int64 (m,), sorted: id of the first n-1 words times the number of words, plus the last word.
    For n = 1 the words themselves, 0 to m-1."""
    counts: np.ndarray
    """int64 (m,)"""
    total: int
    """n-grams of this order in the text, frequent or not."""


@dataclass
class WordFile:
    """Texts as numbers of words in a temporary file; a block ends where a text ends."""

    file: BinaryIO
    sizes: list[int] = field(default_factory=list)
    frequent: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The numbers in the file of the frequent words, sorted."""

    def write(self, numbers: np.ndarray) -> None:
        self.file.write(numbers.astype(np.int32).tobytes())
        self.sizes.append(len(numbers))

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(words, is_word), both (k,): the frequent word or -1, and False where words break off."""
        self.file.seek(0)
        for size in self.sizes:
            numbers = np.frombuffer(self.file.read(4 * size), dtype=np.int32)
            yield _places(self.frequent, numbers.astype(np.int64)), numbers != _BREAK


@dataclass(frozen=True)
class NgramCounts:
    words: list[str]
    levels: list[Level]
    """`levels[n - 1]` holds the n-grams of n words."""
    file: WordFile
    lost: int
    """0 where every count is exact."""

    def ids(self, words: np.ndarray, order: int) -> np.ndarray:
        """(k - order + 1,): the n-gram that starts at each place of `words` (k,), or -1."""
        grams = words
        for n in range(2, order + 1):
            keys = _keys(grams, words[n - 1 :], len(self.words))
            grams = _places(self.levels[n - 1].keys, keys)
        return grams

    def word_matrix(self, order: int) -> np.ndarray:
        """int64 (m, order): the words of every frequent n-gram."""
        keys = self.levels[order - 1].keys
        if order == 1:
            return keys[:, None]
        first, last = np.divmod(keys, len(self.words))
        return np.concatenate([self.word_matrix(order - 1)[first], last[:, None]], axis=1)

    def scores(self, order: int, *, squared: bool) -> np.ndarray:
        """float64 (m,): log p(w) minus the log of the likeliest segmentation of w into two or more
        parts, each part with its own p; `squared` takes log p(w)^2.

        p is the share of an n-gram among all of its order. The likeliest segmentation is the one of
        the lowest score: words belong together if no way to part them explains them.
        """
        matrix = self.word_matrix(order)
        best = [np.zeros(len(matrix))]  # best[j]: the likeliest segmentation of the first j words
        for end in range(1, order + 1):
            starts = range(1 if end == order else 0, end)
            parts = [best[start] + self._log_p(matrix[:, start:end]) for start in starts]
            best.append(np.max(parts, axis=0))
        return (2.0 if squared else 1.0) * self._log_p(matrix) - best[order]

    def _log_p(self, matrix: np.ndarray) -> np.ndarray:
        """(m,): log p of frequent n-grams given as (m, n) words."""
        grams = matrix[:, 0]
        for n in range(2, matrix.shape[1] + 1):
            keys = grams * len(self.words) + matrix[:, n - 1]
            grams = np.searchsorted(self.levels[n - 1].keys, keys)
        level = self.levels[matrix.shape[1] - 1]
        return np.log(level.counts[grams] / level.total)


def count_ngrams(
    texts: Iterable[str],
    min_count: int,
    file: BinaryIO,
    *,
    max_words: int = MAX_WORDS,
    max_ngrams: int = MAX_NGRAMS,
    report: Callable[[str], None] = lambda line: None,
) -> NgramCounts:
    """The n-grams of `texts` that occur more than `min_count` times; `file` is an empty one to
    write to and read from, open in binary mode."""
    report("counting words")
    reader, word_file = _WordReader(max_words), WordFile(file)
    for block in reader.read(texts):
        word_file.write(block)
    words, counts, word_file.frequent = reader.frequent(min_count)
    levels = [Level(np.arange(len(words)), counts, reader.totals[0])]
    lost = reader.counts.lost
    for order in range(2, MAX_ORDER + 1):
        report(f"counting sequences of {order} words")
        so_far = NgramCounts(words, levels, word_file, lost)
        table = KeyCounts(max_ngrams)
        for block, _ in word_file.blocks():
            keys = _keys(so_far.ids(block, order - 1), block[order - 1 :], len(words))
            table.add(keys[keys >= 0])
        frequent = table.counts > min_count
        total = reader.totals[order - 1]
        levels.append(Level(table.keys[frequent], table.counts[frequent], total))
        lost = max(lost, table.lost)
    return NgramCounts(words, levels, word_file, lost)


class _WordReader:
    """Turns words into numbers, in order of appearance, and counts them and all n-grams."""

    def __init__(self, max_words: int) -> None:
        self.totals = [0] * MAX_ORDER
        self.counts = KeyCounts(max_words)
        """Of the words that are not forgotten, by number: in the order of `_numbers`."""
        self._numbers: dict[str, int] = {}
        self._next = 0

    def read(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Blocks of numbers, -1 where words break off."""
        block: list[int] = []
        for text in texts:
            for run in RUN.findall(text):
                self._read_run(run.split(), block)
            if len(block) >= _BLOCK_WORDS:
                yield self._counted(block)
                block = []
        yield self._counted(block)

    def frequent(self, min_count: int) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The frequent words, their counts, and their numbers in the file."""
        is_frequent = self.counts.counts > min_count
        words = list(itertools.compress(self._numbers, is_frequent))
        return words, self.counts.counts[is_frequent], self.counts.keys[is_frequent]

    def _read_run(self, words: list[str], block: list[int]) -> None:
        for n in range(min(MAX_ORDER, len(words))):
            self.totals[n] += len(words) - n
        numbers = self._numbers
        for word in words:
            number = numbers.get(word)
            if number is None:
                number = numbers[word] = self._next
                self._next += 1
            block.append(number)
        block.append(_BREAK)

    def _counted(self, block: list[int]) -> np.ndarray:
        numbers = np.array(block, dtype=np.int64)
        self.counts.add(numbers[numbers != _BREAK])
        if len(self._numbers) > len(self.counts.keys):
            # A word that comes again has a new number: what was counted of it so far is lost.
            kept = set(self.counts.keys.tolist())
            self._numbers = {word: i for word, i in self._numbers.items() if i in kept}
        return numbers


class KeyCounts:
    """Counts of int64 keys, sorted by key; beyond `max_size` keys the rarer half is dropped."""

    def __init__(self, max_size: int) -> None:
        self.keys = np.zeros(0, dtype=np.int64)
        self.counts = np.zeros(0, dtype=np.int64)
        self.lost = 0
        self._max_size = max_size

    def add(self, keys: np.ndarray) -> None:
        keys, counts = np.unique(keys, return_counts=True)
        places = np.searchsorted(self.keys, keys)
        is_known = np.zeros(len(keys), dtype=bool)
        within = places < len(self.keys)
        is_known[within] = self.keys[places[within]] == keys[within]
        self.counts[places[is_known]] += counts[is_known]
        is_new = ~is_known
        self.keys = np.insert(self.keys, places[is_new], keys[is_new])
        self.counts = np.insert(self.counts, places[is_new], counts[is_new])
        if len(self.keys) > self._max_size:
            floor = _floor(self.counts, self._max_size // 2)
            kept = self.counts > floor
            self.keys, self.counts = self.keys[kept], self.counts[kept]
            self.lost += floor


def _floor(counts: np.ndarray, keep: int) -> int:
    """The lowest count such that at most `keep` of `counts` are above it."""
    place = len(counts) - keep - 1
    return int(np.partition(counts, place)[place])


def _keys(grams: np.ndarray, last: np.ndarray, num_words: int) -> np.ndarray:
    """(len(last),): the key of each (n-1)-gram with the word after it; -1 unless the word and both
    (n-1)-grams, the one here and the one a word later, are frequent."""
    here, later = grams[: len(last)], grams[1 : len(last) + 1]
    return np.where((here >= 0) & (later >= 0) & (last >= 0), here * num_words + last, -1)


def _places(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where each of `keys` stands in `sorted_keys`, -1 if nowhere."""
    if not len(sorted_keys):
        return np.full(len(keys), -1, dtype=np.int64)
    places = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[places] == keys, places, -1)
