"""Figures of an interval, gathered step by step: what a worker's log says of its training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffurefill.data.packing import PackingCounts, Position
from diffurefill.runtime import sent
from diffurefill.train.step import StepResult

T_BINS = np.linspace(0.0, 1.0, 5)
"""Edges of the mask-rate bins: a loss by t shows what a mean hides."""


class _Taken(NamedTuple):
    step: int
    position: Position | None
    """Where its rows began."""
    is_finite: Tensor


@dataclass
class IntervalMetrics:
    """Sums over the steps of one interval. What the device computes stays there until `facts`:
    a step that waited for it would leave the device idle before the next one."""

    clip_norm: float
    num_steps: int = 0
    num_masked: int = 0
    num_tokens: int = 0
    num_parts: int = 0
    num_prefix_parts: int = 0
    num_skipped: int = 0
    loss_scale: float | None = None
    masked_by_bin: np.ndarray = field(default_factory=lambda: np.zeros(len(T_BINS) - 1))
    packing: PackingCounts = field(default_factory=PackingCounts)
    _ce_by_bin: Tensor | None = None
    _num_clipped: Tensor | None = None
    _taken: list[_Taken] = field(default_factory=list)
    """In the order in which they were taken; a worker that keeps its drift goes back in number."""

    def add(
        self,
        result: StepResult,
        packing: PackingCounts,
        step: int,
        position: Position | None,
    ) -> None:
        """`position`: where the rows of global `step` began."""
        corrupted = result.corrupted
        parts, num_parts = corrupted.parts.flatten().numpy(), len(corrupted.t)
        masked = np.bincount(parts, corrupted.is_masked.flatten().numpy(), num_parts)
        bins = np.digitize(corrupted.t.numpy(), T_BINS[1:-1])
        np.add.at(self.masked_by_bin, bins, masked)
        self.num_steps += 1
        self.num_masked += int(masked.sum())
        self.num_tokens += result.num_tokens
        self.num_parts += num_parts
        self.num_prefix_parts += int(corrupted.has_prefix.sum())
        self.packing = packing
        self.loss_scale = result.loss_scale
        is_finite = self._add_on_device(result, torch.from_numpy(bins))
        self._taken.append(_Taken(step, position, is_finite))

    def _add_on_device(self, result: StepResult, bins: Tensor) -> Tensor:
        """Whether the step was one of numbers, ()."""
        device = result.part_ce.device
        if self._ce_by_bin is None or self._num_clipped is None:
            self._ce_by_bin = torch.zeros(len(T_BINS) - 1, dtype=torch.float64, device=device)
            self._num_clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._ce_by_bin.index_add_(0, sent(bins, device), result.part_ce.double())
        if result.is_skipped:  # too large a factor: neither a clip nor a number that is none
            self.num_skipped += 1
            return result.loss.isfinite()
        self._num_clipped += result.grad_norm > self.clip_norm
        return result.loss.isfinite() & result.grad_norm.isfinite()

    def facts(self) -> dict[str, Any]:
        """Shares in [0, 1]; `ce_by_t` in nats per masked token, None where a bin is empty. Waits
        for the device."""
        ce = [0.0] * (len(T_BINS) - 1) if self._ce_by_bin is None else self._ce_by_bin.tolist()
        by_t = {
            f"{low:g}-{high:g}": float(total / n) if n else None
            for low, high, total, n in zip(
                T_BINS[:-1], T_BINS[1:], ce, self.masked_by_bin, strict=True
            )
        }
        num_clipped = 0 if self._num_clipped is None else int(self._num_clipped)
        return {
            "ce_by_t": by_t,
            "masked_share": self.num_masked / max(self.num_tokens, 1),
            "prefix_share": self.num_prefix_parts / max(self.num_parts, 1),
            "clip_share": num_clipped / max(self.num_steps, 1),
            **packing_facts(self.packing),
            **self._scaling(),
            **self._first_nonfinite(),
        }

    def _scaling(self) -> dict[str, Any]:
        """Of float16 alone: the factor at the end, and the steps that it was too large for."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.loss_scale, "skipped_steps": self.num_skipped}

    def _first_nonfinite(self) -> dict[str, Any]:
        """The first step whose loss or gradient was not finite, and where its rows began."""
        for step, position, is_finite in self._taken:
            if not is_finite:
                return {
                    "nonfinite_step": step,
                    "nonfinite_rows_from": None if position is None else position.to_json(),
                }
        return {}


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Numbers for a log; waits for the device."""
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}


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
