"""What a judge and plain counting say of one set of samples, side by side, and of two sets.

A judge's figure alone rewards repetition, so there is no table here without diversity beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from diffurefill.evaluate.judge import Score
from diffurefill.evaluate.statistics import (
    Interval,
    bootstrap_mean,
    paired_difference,
    pooled_items,
)
from diffurefill.evaluate.text import (
    TextStatistics,
    distinct_shares,
    doubled_pairs,
    text_statistics,
    words,
)


@dataclass(frozen=True)
class Judged:
    """One set of samples; item i answers prompt i, in every set that is compared."""

    title: str
    num_forward_passes: int | None
    """None for text that no model wrote."""
    items: dict[str, list[float]]
    """Per sample: `nll` (nats, summed), `judge_tokens`, `doubled`, `pairs`, `doubled_words`,
    `word_pairs`, `distinct_2`."""
    statistics: TextStatistics

    def values(self, figure: str) -> np.ndarray:
        """One value per sample whose mean is the figure; `nll` is then nats per judge token.

        All 0 where there is nothing to count: `statistics` tells how many samples are empty.
        """
        if figure == "distinct_2":
            return np.array(self.items["distinct_2"])
        above, below = FIGURES[figure]
        if not any(self.items[below]):
            return np.zeros(len(self.items[below]))
        return pooled_items(self.items[above], self.items[below])

    def interval(self, figure: str) -> Interval:
        return bootstrap_mean(self.values(figure))

    def minus(self, other: Judged, figure: str) -> Interval:
        """The difference of the two figures, paired by prompt."""
        return paired_difference(self.values(figure), other.values(figure))


FIGURES = {
    "nll": ("nll", "judge_tokens"),
    "doubled": ("doubled", "pairs"),
    "doubled_words": ("doubled_words", "word_pairs"),
    "distinct_2": ("distinct_2", ""),
}
"""Figures with an interval: a pooled ratio of two items each, or an item's own mean."""


def judged(
    title: str,
    num_forward_passes: int | None,
    samples: Sequence[Sequence[int]],
    texts: Sequence[str],
    scores: Sequence[Score],
) -> Judged:
    """`samples`: generated ids cut at EOS; `texts`: the same as text; `scores`: the judge's."""
    doubled = [doubled_pairs(sample) for sample in samples]
    doubled_words = [doubled_pairs(words(text)) for text in texts]
    items: dict[str, list[float]] = {
        "nll": [round(score.nll, 4) for score in scores],
        "judge_tokens": [score.num_tokens for score in scores],
        "doubled": [n for n, _ in doubled],
        "pairs": [n for _, n in doubled],
        "doubled_words": [n for n, _ in doubled_words],
        "word_pairs": [n for _, n in doubled_words],
        "distinct_2": [round(share, 5) for share in distinct_shares(samples)],
    }
    return Judged(title, num_forward_passes, items, text_statistics(samples, texts))


def judged_json(row: Judged, against: dict[str, Judged]) -> dict[str, Any]:
    """All figures of a set, its differences to other sets, and the items they come from."""
    return {
        "title": row.title,
        "num_forward_passes": row.num_forward_passes,
        **{figure: row.interval(figure).to_json() for figure in FIGURES},
        "statistics": row.statistics.to_json(),
        "minus": {
            name: {figure: row.minus(other, figure).to_json() for figure in FIGURES}
            for name, other in against.items()
        },
        "items": row.items,
    }


def judged_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `judged_json` for the eye: the judge's figure and the diversity beside it.

    Behind +- half of the 95% interval. Doubled tokens and words, distinct bigrams over the set and
    in each sample, entropy of the tokens, samples that ended at once.
    """
    table = Table(title=title, box=None)
    table.add_column("")
    for column in ("calls", "NLL", "doubled", "words", "dist-2", "each", "entropy", "empty"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        calls, stats, nll = row["num_forward_passes"], row["statistics"], row["nll"]
        table.add_row(
            row["title"],
            "-" if calls is None else str(calls),
            f"{nll['mean']:.3f} \u00b1{(nll['high'] - nll['low']) / 2:.3f}",
            f"{stats['doubled_tokens']:.2%}",
            f"{stats['doubled_words']:.2%}",
            f"{stats['distinct_2']:.3f}",
            f"{stats['distinct_2_per_sample']:.3f}",
            f"{stats['unigram_entropy']:.2f}",
            str(stats["num_empty"]),
        )
    return table
