"""Figures of an interval, gathered step by step: what a worker's log says of its training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diffurefill.data.packing import PackingCounts
from diffurefill.train.step import StepResult

T_BINS = np.linspace(0.0, 1.0, 5)
"""Edges of the mask-rate bins: a loss by t shows what a mean hides."""


@dataclass
class IntervalMetrics:
    """Sums over the steps of one interval. `add` waits for the device once a step."""

    clip_norm: float
    num_steps: int = 0
    num_clipped: int = 0
    num_masked: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_prefix_rows: int = 0
    ce_by_bin: np.ndarray = field(default_factory=lambda: np.zeros(len(T_BINS) - 1))
    masked_by_bin: np.ndarray = field(default_factory=lambda: np.zeros(len(T_BINS) - 1))
    packing: PackingCounts = field(default_factory=PackingCounts)

    def add(self, result: StepResult, maskable: np.ndarray, packing: PackingCounts) -> None:
        """`maskable` (B,): tokens of each row that could be masked if it had no clean prefix."""
        corrupted = result.corrupted
        masked = corrupted.is_masked.sum(1).numpy()
        bins = np.digitize(corrupted.t.numpy(), T_BINS[1:-1])
        np.add.at(self.ce_by_bin, bins, result.row_ce.double().cpu().numpy())
        np.add.at(self.masked_by_bin, bins, masked)
        self.num_steps += 1
        self.num_clipped += result.grad_norm.item() > self.clip_norm
        self.num_masked += int(masked.sum())
        self.num_tokens += result.num_tokens
        self.num_rows += len(masked)
        self.num_prefix_rows += int((corrupted.num_eligible.numpy() < maskable).sum())
        self.packing = packing

    def facts(self) -> dict[str, Any]:
        """Shares in [0, 1]; `ce_by_t` in nats per masked token, None where a bin is empty."""
        by_t = {
            f"{low:g}-{high:g}": float(ce / n) if n else None
            for low, high, ce, n in zip(
                T_BINS[:-1], T_BINS[1:], self.ce_by_bin, self.masked_by_bin, strict=True
            )
        }
        return {
            "ce_by_t": by_t,
            "masked_share": self.num_masked / max(self.num_tokens, 1),
            "prefix_share": self.num_prefix_rows / max(self.num_rows, 1),
            "clip_share": self.num_clipped / max(self.num_steps, 1),
            "padding_share": self.packing.padding_share,
            "documents_cut": self.packing.num_documents_cut,
        }
