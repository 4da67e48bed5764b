"""Denoisers small enough to reason about; all keep the contract of `model.Denoiser.forward`.

Each is elementwise over positions, so that a row's logits are bit for bit the same in any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

BOS, EOS, MASK, PAD = 0, 1, 2, 3


def selected(logits: Tensor, at: Tensor) -> Tensor:
    """(N, V) of logits (B, T, V): at the True positions of `at` (B, T), or at its indices (N,)."""
    return logits[at] if at.dtype == torch.bool else logits.flatten(0, 1)[at]


class TinyDenoiser(nn.Module, ABC):
    """Counts its calls and selects `at`; a subclass says what the logits (B, T, V) are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.eval()

    def forward(
        self, canvas: Tensor, doc_ids: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor:
        self.num_calls += 1
        if doc_ids is None:
            doc_ids = torch.zeros_like(canvas, dtype=torch.int32)
        logits = self.logits(canvas, doc_ids)
        return logits if at is None else selected(logits, at)

    @abstractmethod
    def logits(self, canvas: Tensor, doc_ids: Tensor) -> Tensor:
        """(B, T, V)."""


class TableDenoiser(TinyDenoiser):
    """Logits by position alone: a table (T_max, V)."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def logits(self, canvas: Tensor, doc_ids: Tensor) -> Tensor:
        B, T = canvas.shape
        return self.table[:T].expand(B, T, -1)


class OracleDenoiser(TableDenoiser):
    """All but sure of one text (T_max,), whatever the canvas holds."""

    def __init__(self, text: Tensor, vocab_size: int) -> None:
        super().__init__(20.0 * nn.functional.one_hot(text, vocab_size).float())


class BigramDenoiser(TinyDenoiser):
    """Logits by position and by the tokens beside it in the same document, MASK included."""

    def __init__(self, vocab_size: int, max_tokens: int = 64, scale: float = 2.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.left, self.right = (
            scale * torch.randn(vocab_size, vocab_size, generator=generator) for _ in range(2)
        )
        self.place = torch.randn(max_tokens, vocab_size, generator=generator)

    def logits(self, canvas: Tensor, doc_ids: Tensor) -> Tensor:
        B, T = canvas.shape
        logits = self.place[:T].repeat(B, 1, 1)
        same = ((doc_ids[:, 1:] == doc_ids[:, :-1]) & (doc_ids[:, 1:] >= 0))[..., None]
        logits[:, 1:] += torch.where(same, self.left[canvas[:, :-1]], 0.0)
        logits[:, :-1] += torch.where(same, self.right[canvas[:, 1:]], 0.0)
        return logits
