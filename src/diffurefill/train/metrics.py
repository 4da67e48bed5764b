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
    num_parts: int = 0
    num_prefix_parts: int = 0
    ce_by_bin: np.ndarray = field(default_factory=lambda: np.zeros(len(T_BINS) - 1))
    masked_by_bin: np.ndarray = field(default_factory=lambda: np.zeros(len(T_BINS) - 1))
    packing: PackingCounts = field(default_factory=PackingCounts)

    def add(self, result: StepResult, can_mask: np.ndarray, packing: PackingCounts) -> None:
        """`can_mask` (B, T): what could be masked if no row had a clean prefix."""
        corrupted = result.corrupted
        parts, num_parts = corrupted.parts.flatten().numpy(), len(corrupted.t)
        masked = np.bincount(parts, corrupted.is_masked.flatten().numpy(), num_parts)
        maskable = np.bincount(parts, can_mask.ravel(), num_parts)
        bins = np.digitize(corrupted.t.numpy(), T_BINS[1:-1])
        np.add.at(self.ce_by_bin, bins, result.part_ce.double().cpu().numpy())
        np.add.at(self.masked_by_bin, bins, masked)
        self.num_steps += 1
        self.num_clipped += result.grad_norm.item() > self.clip_norm
        self.num_masked += int(masked.sum())
        self.num_tokens += result.num_tokens
        self.num_parts += num_parts
        self.num_prefix_parts += int((corrupted.num_eligible.numpy() < maskable).sum())
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
            "prefix_share": self.num_prefix_parts / max(self.num_parts, 1),
            "clip_share": self.num_clipped / max(self.num_steps, 1),
            **packing_facts(self.packing),
        }


def packing_facts(counts: PackingCounts) -> dict[str, Any]:
    """What an interval's rows held. Shares in [0, 1]; of documents and tokens, by source."""
    rows, documents = max(counts.num_rows, 1), max(sum(counts.documents.values()), 1)
    tokens = max(counts.num_tokens, 1)
    return {
        "padding_share": counts.padding_share,
        "documents_cut_share": counts.num_documents_cut / documents,
        "head_share": counts.num_heads / max(counts.num_parts, 1),
        "short_share": counts.num_short_rows / rows,
        "span_row_share": counts.num_span_rows / rows,
        "span_token_share": counts.num_span_tokens / tokens,
        "documents": {name: n / documents for name, n in sorted(counts.documents.items())},
        "tokens": {name: n / tokens for name, n in sorted(counts.tokens.items())},
    }
