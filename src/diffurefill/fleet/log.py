"""A worker's log: one JSON object a line, pushed with its contribution, read by `status`.

The whole fleet is judged by these files and never by asking a machine (the report's rule i).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from diffurefill.fleet import records
from diffurefill.store.base import Store

MAX_LINES = 200
"""Lines of history a log keeps: a few tens of kilobytes with every push."""


class WorkerLog:
    """Lines to push, each also said on the screen unless it is quiet."""

    def __init__(
        self,
        worker: int,
        incarnation: str,
        report: Callable[[str], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._worker, self._incarnation, self._report = worker, incarnation, report
        # Wall time is for people: no rule of the fleet compares clocks of two machines.
        self._wall_clock = wall_clock
        self._lines: list[str] = []

    def continue_from(self, content: bytes) -> None:
        """Keep what an earlier incarnation had logged."""
        self._lines = content.decode().splitlines()

    def note(self, phase: str, facts: dict[str, Any], *, quiet: bool = False) -> None:
        identity = {"time": self._wall_clock(), "incarnation": self._incarnation}
        record = {**identity, "phase": phase, **facts}
        self._lines = [*self._lines, as_line(record)][-MAX_LINES:]
        if not quiet:
            self._report(f"worker {self._worker}: {phase} {_plain(facts)}")

    def content(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()


def as_line(record: dict[str, Any]) -> str:
    """Strict JSON, which has no word for a number that is not finite: null takes its place."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_log(store: Store, worker: int) -> list[dict[str, Any]]:
    """The records of a worker's pushed log, oldest first; empty when it has none."""
    version = store.head(records.lane_of(worker))
    path = records.worker_paths(worker).log
    if version is None or path not in version.files:
        return []
    lines = store.read(version.ref(path)).decode().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _plain(facts: dict[str, Any]) -> str:
    """`gen 3, loss 4.21`: numbers short, nested facts left to the file."""
    return ", ".join(
        f"{k.replace('_', ' ')} {v:.4g}" if isinstance(v, float) else f"{k.replace('_', ' ')} {v}"
        for k, v in facts.items()
        if not isinstance(v, (dict, list))
    )
