"""Trouble that may pass, and how long to put up with it."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from diffurefill.config import UserError
from diffurefill.runtime import philox

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 60.0
WORTH_A_WORD_SECONDS = 8.0
"""A longer wait is logged; the odd broken connection is not."""


class Passing(Exception):
    """A request failed for a reason that may pass. `seconds`: how long the server asks to wait."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.seconds = seconds


@dataclass(frozen=True)
class Patience:
    """How long one read may fail before it is given up. `clock` gives monotonic seconds."""

    budget_seconds: float = 900.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


READING = Patience()
"""A run lives through a quarter of an hour without network."""
LISTING = Patience(budget_seconds=60.0)
"""A person waits for this."""


def retried(what: str, attempt: Callable[[], T], patience: Patience) -> T:
    """What `attempt` returns once it raises no Passing; UserError when the budget is used up."""
    start = patience.clock()
    for number in itertools.count():
        try:
            return attempt()
        except Passing as trouble:
            left = patience.budget_seconds - (patience.clock() - start)
            if left <= 0:
                raise UserError(
                    f"{what} cannot be reached: {number + 1} attempts in "
                    f"{patience.budget_seconds / 60:.0f} min failed, the last with: {trouble}; "
                    "check the network and start again"
                ) from None
            seconds = min(max(_pause(what, number), trouble.seconds), left)
            if seconds >= WORTH_A_WORD_SECONDS:
                logger.warning("%s: %s; trying again in %.0f s", what, trouble, seconds)
            patience.sleep(seconds)
    raise AssertionError  # the loop has no end


def _pause(what: str, number: int) -> float:
    """Seconds before the attempt after `number`: doubling, with jitter, or a fleet that lost one
    server together would come back to it together."""
    whole = min(FIRST_SECONDS * 2 ** min(number, 30), LONGEST_SECONDS)
    return whole * (0.5 + 0.5 * philox("pause", what, os.getpid(), number).random())
