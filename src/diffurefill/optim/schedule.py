"""The learning rate as a pure function of the global step (spec algorithms 3.2)."""

from __future__ import annotations

import math

from diffurefill.config import OptimConfig


def learning_rate(step: int, config: OptimConfig) -> float:
    """The rate of the update that brings the model from `step - 1` to `step`.

    A fresh model stands at step 0 and its first update asks for step 1, so no update is lost to
    the rate 0. Every worker at the same global step has the same rate.

    peak(step) * warm-up and cosine to `floor`; from `tail_from_step` on the cosine is frozen at
    its value there and falls linearly to 0 at `total_steps`.
    """
    tail = config.tail_from_step
    if tail is None or step <= tail:
        return _peak(step, config) * _shape(step, config)
    left = max(config.total_steps - step, 0) / (config.total_steps - tail)
    return _peak(step, config) * _shape(tail, config) * left


def _peak(step: int, config: OptimConfig) -> float:
    return [rate for from_step, rate in config.peak_lr if from_step <= step][-1]


def _shape(step: int, config: OptimConfig) -> float:
    """Share of the peak: linear warm-up from 0, then half a cosine down to `floor`."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    past = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(past, 1.0)))
    return config.floor + (1.0 - config.floor) * cosine
