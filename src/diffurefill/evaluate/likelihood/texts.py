"""A continuation behind its context, as the model reads it; and what a score says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffurefill.config import UserError

Ids = NDArray[np.int32]


class Score(NamedTuple):
    """One continuation's score; unpacks to what the harness wants."""

    log_likelihood: float
    """In nats, summed over the tokens; -inf for a continuation that does not fit in a row."""
    is_greedy: bool
    """Whether every token was the model's first choice where it was predicted: greedy decoding in
    the scorer's order would have written exactly this."""


@dataclass(frozen=True, eq=False)
class Text:
    """BOS, context, continuation: `ids` (T,) int32, the continuation from `first` on."""

    ids: Ids
    first: int
    is_truncated: bool = False
    """Context was cut from the left to fit."""

    @property
    def continuation(self) -> Ids:
        return self.ids[self.first :]

    def hidden(self, mask_id: int, right_masks: int) -> Ids:
        """The canvas with the whole continuation masked, and `right_masks` more behind it."""
        length = len(self.continuation) + right_masks
        return np.concatenate([self.ids[: self.first], np.full(length, mask_id, np.int32)])


def lay_out(
    context: Sequence[int],
    continuation: Sequence[int],
    *,
    bos_id: int,
    max_tokens: int,
    right_masks: int = 0,
) -> Text | None:
    """The text in a row of at most `max_tokens`; None where the continuation alone is too long.

    A BOS at the context's start is not doubled. What is too much is cut from the context's left,
    and BOS stays, as training had it.
    """
    room = max_tokens - 1 - len(continuation) - right_masks
    if room < 0:
        return None
    given = list(context)
    if given[:1] == [bos_id]:
        del given[0]
    kept = given[max(0, len(given) - room) :]
    ids = np.array([bos_id, *kept, *continuation], dtype=np.int32)
    return Text(ids, 1 + len(kept), is_truncated=len(kept) < len(given))


def rolling_windows(
    tokens: Sequence[int], max_tokens: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(context, continuation) pairs that predict every token of a long text once.

    Each window but the first sees the token before it; all begin with BOS. The windows' scores add
    up to the text's. `max_tokens`: of a row, without the MASKs behind it. UserError where a row has
    no room for a token beside those two.
    """
    if max_tokens < 3:
        raise UserError(
            f"a row has {max(0, max_tokens)} tokens left for a piece of a whole document, which "
            "needs 3: choose fewer right_masks, or a larger max_length"
        )
    width = max_tokens - 2
    first = max_tokens - 1
    later = [
        (tokens[start - 1 : start], tokens[start : start + width])
        for start in range(first, len(tokens), width)
    ]
    return [((), tokens[:first]), *later]
