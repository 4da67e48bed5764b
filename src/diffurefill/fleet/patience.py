"""Store operations of a process that must outlive its store: what fails in passing is waited for.

A hub may be down for hours. A worker or merger that gave up would need a person to start it again,
so passing trouble (`Busy`) is waited out however long it takes, and damaged or vanished files are
asked for a few times more before they are believed. Source: spec fleet.md 4 (fault model).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import TypeVar

from diffurefill.store.base import Busy, Corrupt

T = TypeVar("T")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
MAX_CORRUPT = 4
"""Answers in a row that cannot be what was stored before the file is taken to be damaged."""


class Patience:
    """Runs store operations for one actor (a generator that yields seconds to wait).

    Yields before every operation, so that a scheduler can interleave, kill or delay actors between
    any two effects. Pauses double up to a minute, with jitter so that a fleet does not return all
    at once.
    """

    def __init__(self, report: Callable[[str], None], jitter: random.Random) -> None:
        self._report, self._jitter = report, jitter
        self._num_failed = 0

    def take_failed(self) -> int:
        """Operations that failed in passing since the last call, for a log."""
        failed, self._num_failed = self._num_failed, 0
        return failed

    def __call__(self, operation: Callable[[], T]) -> Generator[float, None, T]:
        pause, num_corrupt, told = FIRST_PAUSE, 0, False
        yield 0.0
        while True:
            try:
                done = operation()
            except Busy as busy:
                wait, trouble = max(busy.retry_after, pause), busy
            except Corrupt as corrupt:
                num_corrupt += 1
                if num_corrupt >= MAX_CORRUPT:
                    raise
                wait, trouble = pause, corrupt
            else:
                if told:
                    self._report("the store answers again")
                return done
            self._num_failed += 1
            if not told and pause > FIRST_PAUSE:  # a single hiccup is no news
                self._report(f"the store does not answer ({trouble}); waiting, nothing is lost")
                told = True
            yield wait * self._jitter.uniform(1.0, 1.5)
            pause = min(2.0 * pause, LONGEST_PAUSE)


class Watch:
    """Whether a lane moves: how long it has been silent, told once each time it falls silent."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds`: no shorter silence is told."""
        self._seconds, self._clock = seconds, clock
        self._version, self._since = "", math.inf

    def silence(self, version: str) -> float | None:
        """Seconds without a version after `version`, the lane's newest; None: nothing to tell."""
        if version != self._version:
            self._version, self._since = version, self._clock()
        silent = self._clock() - self._since
        if silent <= self._seconds:
            return None
        self._since = math.inf
        return silent
