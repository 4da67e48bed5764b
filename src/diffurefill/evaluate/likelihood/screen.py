"""Which items a cheap, approximate score decides, and which the exact one.

A benchmark asks which of an item's choices is best. Where the approximate scores put one far ahead,
the exact ones would too; where two are close, they may not: the closest items are left to the exact
scorer (spec performance 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diffurefill.evaluate.likelihood import plans
from diffurefill.evaluate.likelihood.passes import Reader
from diffurefill.evaluate.likelihood.texts import Score, Text
from diffurefill.evaluate.likelihood.two_stream import MAX_TEXT_TOKENS, read_trees, text_tokens


@dataclass(frozen=True)
class Item:
    """Requests of which the best is asked for."""

    choices: tuple[int, ...]
    """Their places among all requests."""
    lengths: tuple[int, ...] | None = None
    """What the metric divides each score by, as length-normalised accuracy; None compares sums."""


def screened(
    reader: Reader,
    texts: Sequence[Text | None],
    items: Sequence[Item],
    *,
    right_masks: int,
    rescore: float,
    on_scores: Callable[[int], None] | None = None,
) -> dict[int, Score]:
    """Scores of one pass, by place in `texts`, that may stand: the rest must be scored exactly.

    The rest are the share `rescore` of the items with the smallest margins, rounded up, and what a
    screen is not for: requests in no item, items of one choice, of one-token choices alone, or with
    a choice that is empty or too long. A score of a text of one token is exact all the same.
    """
    open_to_doubt = [item for item in items if _gains(item, texts, right_masks)]
    indices = [i for item in open_to_doubt for i in item.choices]
    members = [text for i in indices if (text := texts[i]) is not None]
    found: dict[int, Score] = {}
    for member, reading in read_trees(reader, members, right_masks):
        found[indices[member]] = plans.total([reading])
        if on_scores is not None:
            on_scores(len(found))

    def closeness(item: Item) -> tuple[float, list[bytes]]:
        # Equal margins are told apart by their texts: the order of requests decides nothing.
        ids = [text.ids.tobytes() for i in item.choices if (text := texts[i]) is not None]
        return margin(item, found), ids

    num_exact = math.ceil(round(rescore * len(open_to_doubt), 9))
    for item in sorted(open_to_doubt, key=closeness)[:num_exact]:
        for i in item.choices:
            del found[i]
    return found


def margin(item: Item, scores: Mapping[int, Score]) -> float:
    """By how much the best choice leads, by the item's metric."""
    values = np.array([scores[i].log_likelihood for i in item.choices])
    if item.lengths is not None:
        values = values / np.array(item.lengths)
    second, best = np.sort(values)[-2:]
    return float(best - second)


def _gains(item: Item, texts: Sequence[Text | None], right_masks: int) -> bool:
    """Whether a screen of the item saves anything."""
    choices = [text for i in item.choices if (text := texts[i]) is not None]
    lengths = [len(text.continuation) for text in choices]
    return (
        len(item.choices) > 1
        and len(choices) == len(item.choices)
        and min(lengths) > 0
        and max(lengths) > 1
        and all(text_tokens(text, right_masks) <= MAX_TEXT_TOKENS for text in choices)
    )
