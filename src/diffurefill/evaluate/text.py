"""Plain statistics of generated text: repeats and diversity. Lists of ids in, numbers out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def doubled_share(samples: Sequence[Sequence[int]]) -> float:
    """Share of adjacent pairs with equal ids, pooled over the samples (spec algorithms 5.8)."""
    pairs = [(a, b) for ids in samples for a, b in itertools.pairwise(ids)]
    return sum(a == b for a, b in pairs) / max(len(pairs), 1)


def distinct_share(samples: Sequence[Sequence[int]], n: int = 2) -> float:
    """Unique n-grams over all n-grams, over the whole set: depends on the number of samples."""
    grams = [tuple(ids[i : i + n]) for ids in samples for i in range(len(ids) - n + 1)]
    return len(set(grams)) / max(len(grams), 1)
