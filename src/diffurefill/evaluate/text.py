"""Plain statistics of generated text: repeats and diversity. Lists of ids in, numbers out.

Source: spec algorithms 5.8.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Samples = Sequence[Sequence[Hashable]]
"""Samples of token ids, or of words."""


def doubled_pairs(sample: Sequence[Hashable]) -> tuple[int, int]:
    """How many adjacent pairs are equal, and how many there are."""
    pairs = list(itertools.pairwise(sample))
    return sum(a == b for a, b in pairs), len(pairs)


def doubled_share(samples: Samples) -> float:
    """Share of adjacent pairs with equal tokens, pooled over the samples."""
    counts = [doubled_pairs(sample) for sample in samples]
    return sum(doubled for doubled, _ in counts) / max(sum(pairs for _, pairs in counts), 1)


def distinct_share(samples: Samples, n: int = 2) -> float:
    """Unique n-grams over all n-grams, over the whole set: depends on the number of samples."""
    grams = [tuple(ids[i : i + n]) for ids in samples for i in range(len(ids) - n + 1)]
    return len(set(grams)) / max(len(grams), 1)


def distinct_shares(samples: Samples, n: int = 2) -> list[float]:
    """`distinct_share` of each sample by itself; 0 for one that holds no n-gram."""
    return [distinct_share([sample], n) for sample in samples]


def unigram_entropy(samples: Samples) -> float:
    """Entropy in nats of the tokens of the whole set; 0 for none."""
    counts = Counter(itertools.chain.from_iterable(samples))
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def words(text: str) -> list[str]:
    """The words of a text, lower-cased, punctuation at their ends taken off."""
    stripped = (word.strip(".,;:!?\"'()[]-\u201c\u201d\u2018\u2019") for word in text.split())
    return [word.casefold() for word in stripped if word]


@dataclass(frozen=True, kw_only=True)
class TextStatistics:
    """Of a set of samples; compare sets of the same number of samples and tokens only."""

    num_samples: int
    num_empty: int
    """Samples that ended at once: counted above, not left out."""
    num_tokens: int
    doubled_tokens: float
    doubled_words: float
    distinct_2: float
    """Over the set."""
    distinct_2_per_sample: float
    """Mean over the samples."""
    unigram_entropy: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def text_statistics(samples: Samples, texts: Sequence[str]) -> TextStatistics:
    """`samples`: the generated ids of each sample, cut at EOS; `texts`: the same as text."""
    return TextStatistics(
        num_samples=len(samples),
        num_empty=sum(not sample for sample in samples),
        num_tokens=sum(map(len, samples)),
        doubled_tokens=doubled_share(samples),
        doubled_words=doubled_share([words(text) for text in texts]),
        distinct_2=distinct_share(samples),
        distinct_2_per_sample=sum(distinct_shares(samples)) / max(len(samples), 1),
        unigram_entropy=unigram_entropy(samples),
    )
