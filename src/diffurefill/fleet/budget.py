"""A process's part of the commits that a store allows the whole fleet in an hour.

What a generation needs is always published: one commit a worker, two by the merger (the global and
what follows it). Logs and beats, which only show that somebody lives, take what is left of the
process's own part. The store's own limit, where it has one, is kept there (CommitLimit of
hub_client.py, which answers Busy). Source: spec fleet.md I17, 5.0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

HOUR = 3600.0
MERGER_PARTS = 2
FOR_SIGNS = 0.8
"""Share of a part up to which logs and beats may fill it: the rest is for a generation that comes
sooner than the last ones did, or for a start."""


class CommitPart:
    """Counts every commit and refuses none; says whether one that can wait still fits.

    `per_hour` is the whole fleet's (0: no limit), `parts` this process's of one per worker and
    two for the merger.
    """

    def __init__(self, per_hour: int, parts: int, clock: Callable[[], float]) -> None:
        self._per_hour, self._parts, self._clock = per_hour, parts, clock
        self._times: deque[float] = deque()

    def spend(self) -> None:
        """A commit was made."""
        if self._per_hour > 0:
            self._times.append(self._clock())
            self._forget()

    def has_room(self, num_workers: int) -> bool:
        """Whether a log or a beat fits into this process's part of the last hour's commits."""
        if self._per_hour == 0:
            return True
        self._forget()
        ours = self._per_hour * self._parts / (num_workers + MERGER_PARTS)
        return len(self._times) + 1 <= FOR_SIGNS * ours

    def _forget(self) -> None:
        while self._times and self._times[0] < self._clock() - HOUR:
            self._times.popleft()
