"""Tokens a second and MFU of steps taken: one way of counting for the bench and for every log.

Time is that of the steps, waiting for rows included; what is done between steps (probes, saving,
talking to the store) is left out.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from diffurefill.config import ModelConfig, RunConfig
from diffurefill.data.packing import Rows
from diffurefill.model.denoiser import num_parameters
from diffurefill.runtime import training_dtype, wait_for
from diffurefill.train.flops import (
    Peak,
    device_peak,
    measured_bandwidth,
    six_nd,
    step_flops,
    utilisation,
    visible_pairs,
)
from diffurefill.train.step import StepResult

peak_of = functools.cache(device_peak)
"""The peak of a device in a dtype, measured once a process where no datasheet has it."""
bandwidth_of = functools.cache(measured_bandwidth)


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


class LeastSeconds(NamedTuple):
    """What forward passes cannot undercut on a device."""

    by_flops: float
    """With every product at the peak."""
    by_reads: float
    """With all weights read once a pass, as fast as the device reads memory."""


def least_seconds(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_passes: int,
    num_positions: int,
    num_logits: int,
    num_pairs: int,
) -> LeastSeconds:
    """Of `num_passes` passes over so many positions in all, logits at so many of them."""
    work = step_flops(config, num_tokens=num_positions, num_masked=num_logits, num_pairs=num_pairs)
    read = num_passes * num_parameters(config) * dtype.itemsize
    return LeastSeconds(work.forward / peak_of(device, dtype).flops, read / bandwidth_of(device))


@dataclass
class StepClock:
    """Seconds spent in steps on `device`, without waiting for it in a step.

    On CUDA a step's time is that between two events in the device's queue: it holds the time in
    which the queue was empty because rows were missing.
    """

    device: torch.device
    _seconds: float = 0.0
    _began: float = 0.0
    _begin: torch.cuda.Event | None = None
    _steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def begin(self) -> None:
        """A step that was begun and never ended is forgotten."""
        self._began, self._begin = time.perf_counter(), self._mark()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._began
        end = self._mark()
        if self._begin is not None and end is not None:
            self._steps.append((self._begin, end))

    def take(self) -> float:
        """Seconds since the last call. Waits for the device."""
        wait_for(self.device)
        seconds = self._seconds
        if self._steps:
            seconds = sum(begin.elapsed_time(end) for begin, end in self._steps) / 1000.0
        self._seconds, self._steps = 0.0, []
        return seconds

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


__all__ = [
    "LeastSeconds",
    "Peak",
    "StepClock",
    "Work",
    "bandwidth_of",
    "exact_flops_per_token",
    "least_seconds",
    "peak_of",
    "speed_facts",
]
