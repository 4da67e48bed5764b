"""Near-duplicates by MinHash: texts that share most of their word sequences.

A text becomes 128 minima, in 16 bands of 8. Two texts whose word sequences overlap with Jaccard
similarity s agree in some band with probability 1 - (1 - s^8)^16: 0.06 at s = 0.5, 0.61 at 0.7,
0.95 at 0.8, 0.9999 at 0.9. Memory: 128 bytes a text.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import numpy as np

from diffurefill.data.facts.filters import words_of
from diffurefill.runtime import philox

NUM_BANDS = 16
ROWS_PER_BAND = 8


def band_hashes(text: str, sequence_words: int, group: str = "") -> np.ndarray:
    """uint64 (NUM_BANDS,): texts of one group that agree in any of them are near-duplicates.

    `sequence_words` is the length of the word sequences compared. Texts of different groups never
    agree.
    """
    sequences = np.array(list(_sequence_hashes(words_of(text), sequence_words)), dtype=np.uint64)
    factors, offsets, mixers = _constants()
    minima = (sequences[:, None] * factors + offsets).min(axis=0)
    bands = (_scrambled(minima) * mixers).reshape(NUM_BANDS, ROWS_PER_BAND).sum(axis=1)
    salt = np.uint64(_hash64(f"group {group}"))
    return _scrambled(bands ^ salt ^ np.arange(NUM_BANDS, dtype=np.uint64))


def repeats(hashes: np.ndarray) -> np.ndarray:
    """bool (n,): which rows of `hashes` (n, any) agree in some column with an earlier row.

    The first of each kind stays, so the order of the texts decides which.
    """
    is_repeat = np.zeros(len(hashes), dtype=bool)
    for column in hashes.T:
        _, first, inverse = np.unique(column, return_index=True, return_inverse=True)
        is_repeat |= first[inverse] < np.arange(len(hashes))
    return is_repeat


def same_words_hash(text: str) -> int:
    """64 bits that texts of the same words share, whatever their punctuation and capitals."""
    return _hash64(" ".join(words_of(text)))


def _sequence_hashes(words: list[str], length: int) -> Iterable[int]:
    count = max(len(words) - length + 1, 1)
    return {_hash64(" ".join(words[start : start + length])) for start in range(count)}


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@functools.cache
def _constants() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Odd factors and offsets of 128 maps of the 64-bit numbers, and odd factors to mix rows."""
    size = (3, NUM_BANDS * ROWS_PER_BAND)
    drawn = philox("near-duplicates").integers(0, 1 << 64, size=size, dtype=np.uint64)
    factors, offsets, mixers = drawn
    return factors | np.uint64(1), offsets, mixers | np.uint64(1)


def _scrambled(values: np.ndarray) -> np.ndarray:
    """A one-to-one map in which every bit of the input changes half of the output's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
