"""A short measurement at start-up: which attention backend is fastest on this device, these rows.

    choice = fastest_backend(device, doc_ids, heads=16, head_dim=128, dtype=torch.bfloat16)
    model.attention_backend = choice.backend        # and log `choice.describe()`

On a GPU flex is compiled on the way, which takes most of the time and is needed anyway.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.model.attention import attention
from diffurefill.model.backends import BACKENDS, Shape, hardware_of, why_not
from diffurefill.model.segments import Backend, segments_from_doc_ids
from diffurefill.runtime import philox, wait_for


@dataclass(frozen=True)
class Choice:
    """What `fastest_backend` found."""

    backend: Backend
    milliseconds: dict[Backend, float]
    """Median of one call, forward and backward where it trains, fastest first."""
    refused: dict[Backend, str]
    """The backends that cannot run here, and why."""

    def describe(self) -> str:
        """One line for a log."""
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.milliseconds.items())
        return f"attention: {self.backend} ({times})"


def fastest_backend(
    device: torch.device,
    doc_ids: Tensor,
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    training: bool = True,
    repeats: int = 5,
) -> Choice:
    """Time every backend that runs on `device` on the documents of `doc_ids` (B, T), in turn.

    dtype: of q, k and v: the autocast type where there is one. Wall time, so other processes'
    load counts. Raises UserError when no backend runs.
    """
    shape = Shape(doc_ids.shape[0], heads, doc_ids.shape[1], head_dim, dtype)
    inputs = [x.to(device).requires_grad_(training) for x in _qkv_and_gradient(shape)]
    calls: dict[Backend, Callable[[], object]] = {}
    refused: dict[Backend, str] = {}
    for backend in BACKENDS:
        reason = why_not(backend, hardware_of(device), shape, training=training)
        if reason is None:
            try:
                calls[backend] = _call(backend, inputs, doc_ids, causal, training)
                continue
            # A kernel, or the compiler before it, may fail in any way on a card nobody has tried it
            # on: then it is not the fastest.
            except Exception as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
        refused[backend] = reason
    if not calls:
        raise UserError(f"no attention backend runs on {device}: {refused}")
    times = _milliseconds(calls, device, repeats)
    best = next(iter(times))
    return Choice(best, times, refused)


def _call(
    backend: Backend, inputs: list[Tensor], doc_ids: Tensor, causal: bool, training: bool
) -> Callable[[], object]:
    """One call of the backend, tried out once: that compiles it, and shows whether it runs."""
    q, k, v, gradient = inputs
    segments = segments_from_doc_ids(
        doc_ids, causal=causal, backend=backend, device=q.device, dtype=q.dtype
    )

    def call() -> object:
        with torch.set_grad_enabled(training):
            out = attention(q, k, v, segments)
            return torch.autograd.grad(out, (q, k, v), gradient.detach()) if training else out

    call()
    return call


def _milliseconds(
    calls: dict[Backend, Callable[[], object]], device: torch.device, repeats: int
) -> dict[Backend, float]:
    """Median of `repeats` calls, the backends by turns; fastest first."""
    seconds: dict[Backend, list[float]] = {backend: [] for backend in calls}
    for _ in range(repeats):
        for backend, call in calls.items():
            wait_for(device)
            start = time.perf_counter()
            call()
            wait_for(device)
            seconds[backend].append(time.perf_counter() - start)
    medians = {backend: 1000 * statistics.median(taken) for backend, taken in seconds.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def _qkv_and_gradient(shape: Shape) -> list[Tensor]:
    """Four (B, H, T, K) tensors; every row the same, for drawing them would take longest."""
    rows, heads, positions, head_dim, dtype = shape
    drawn = philox("attention", *shape[:4]).standard_normal(
        (4, 1, heads, positions, head_dim), dtype="float32"
    )
    return [x.expand(rows, -1, -1, -1).to(dtype).clone() for x in torch.from_numpy(drawn)]
