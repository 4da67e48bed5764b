"""Tokens a second and MFU of steps taken: one way of counting for the bench and for every log.

Time is that of the steps, waiting for rows included; what is done between steps (probes, saving,
talking to the store) is left out.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from diffurefill.config import RunConfig
from diffurefill.data.packing import Rows
from diffurefill.runtime import training_dtype
from diffurefill.train.flops import (
    Peak,
    device_peak,
    six_nd,
    step_flops,
    utilisation,
    visible_pairs,
)
from diffurefill.train.step import StepResult
from diffurefill.train.timing import wait_for

peak_of = functools.cache(device_peak)
"""The peak of a device in a dtype, measured once a process where no datasheet has it."""


@dataclass
class Work:
    """What steps did."""

    steps: int = 0
    tokens: int = 0
    """Real ones, padding aside."""
    positions: int = 0
    masked: int = 0
    pairs: int = 0
    """(query, key) pairs that may see each other."""

    def add(self, result: StepResult, rows: Rows, *, causal: bool) -> None:
        self.steps += 1
        self.tokens += result.num_tokens
        self.positions += rows.ids.size
        self.masked += result.num_masked
        self.pairs += visible_pairs(rows.doc_ids, causal=causal)


def speed_facts(
    config: RunConfig, device: torch.device, work: Work, seconds: float
) -> dict[str, Any]:
    """Tokens a second, and MFU in [0, 1] by both counts over the peak that is named."""
    peak = peak_of(device, training_dtype(device, config.train.precision) or torch.float32)
    rate, exact = work.tokens / max(seconds, 1e-9), exact_flops_per_token(config, work)
    return {
        "tokens_per_second": rate,
        "flops_per_token": exact,
        "mfu_6nd": utilisation(six_nd(config.model), rate, peak),
        "mfu_exact": utilisation(exact, rate, peak),
        "peak_flops": peak.flops,
        "peak": peak.what,
    }


def exact_flops_per_token(config: RunConfig, work: Work) -> float:
    """Forward and backward; see flops.py for what is counted."""
    counts = {"num_tokens": work.tokens, "num_masked": work.masked, "num_pairs": work.pairs}
    return step_flops(config.model, **counts).per(work.tokens).training


@dataclass
class StepClock:
    """Seconds spent in steps on `device`, without waiting for it in a step.

    On CUDA a step's time is that between two events in the device's queue: it holds the time in
    which the queue was empty because rows were missing.
    """

    device: torch.device
    _seconds: float = 0.0
    _began: float = 0.0
    _events: list[torch.cuda.Event] = field(default_factory=list)

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._mark()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._began
        self._mark()

    def take(self) -> float:
        """Seconds since the last call. Waits for the device."""
        wait_for(self.device)
        seconds = self._seconds
        if self._events:
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            seconds = sum(begin.elapsed_time(end) for begin, end in pairs) / 1000.0
        self._seconds, self._events = 0.0, []
        return seconds

    def _mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._events.append(event)


__all__ = ["Peak", "StepClock", "Work", "exact_flops_per_token", "peak_of", "speed_facts"]
