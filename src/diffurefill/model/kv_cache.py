"""The past of an autoregressive model: keys and values that later tokens look back at.

Rows of a batch may have pasts of different lengths and may be given different numbers of new
tokens: what stands behind a row's real tokens is written to a slot that nobody reads. Shape
letters: B rows, t new positions, T positions the cache has room for, H heads, K head dim.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.runtime import sent


class KVCache:
    """Keys and values of `num_layers` blocks for `num_rows` rows of up to `max_tokens` tokens.

    Give it to `Denoiser.forward` with the tokens that follow those it holds.
    """

    def __init__(self, num_layers: int, num_rows: int, max_tokens: int) -> None:
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        """(B,): tokens held of each row. On the host: no step waits for the device to count."""
        self.max_tokens = max_tokens
        self.layers = [CachedLayer() for _ in range(num_layers)]

    def extend(self, doc_ids: Tensor | None, num_new: int, device: torch.device) -> Tensor:
        """Take in `num_new` positions a row; returns where they stand, (B, num_new) int64.

        doc_ids: (B, num_new) on the CPU, -1 behind a row's real tokens; None when all are real.
        Raises UserError where a row would hold more than `max_tokens`.
        """
        B = len(self.lengths)
        real = np.ones((B, num_new), dtype=bool)
        if doc_ids is not None:
            real = (doc_ids >= 0).cpu().numpy()
        counts = real.sum(axis=1)
        if (real != (np.arange(num_new) < counts[:, None])).any():
            raise UserError("a cached model takes real tokens first and padding behind them")
        ends = self.lengths + counts
        if ends.max() > self.max_tokens:
            raise UserError(
                f"a row of {ends.max()} tokens in a cache for {self.max_tokens}: make it larger"
            )
        positions = torch.from_numpy(self.lengths[:, None] + np.arange(num_new))
        # Equal pasts of one new token each, or a first call: no mask is needed.
        aligned = bool((ends == ends[0]).all()) and bool(real.all())
        longest = int(ends.max())
        mask, is_causal = None, False
        if aligned and num_new in (1, longest):
            is_causal = num_new > 1
        else:
            mask = torch.arange(longest) <= positions[..., None]  # (B, t, T)
            mask = sent(mask[:, None], device)
        slots = sent(torch.where(torch.from_numpy(real), positions, self.max_tokens), device)
        for layer in self.layers:
            layer.prepare(slots, longest, mask, is_causal, self.max_tokens)
        self.lengths = ends
        return sent(positions.clamp(max=self.max_tokens - 1), device)

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Let go of all rows but these, (N,) indices; they become rows 0 to N - 1."""
        self.lengths = self.lengths[rows]
        for layer in self.layers:
            layer.keep(torch.from_numpy(rows))


class CachedLayer:
    """One block's past; `attend` stands in for attention over a whole row."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        """(B, T + 1, H, K): the last slot takes what is padding."""
        self.values: Tensor | None = None

    def prepare(
        self, slots: Tensor, longest: int, mask: Tensor | None, is_causal: bool, max_tokens: int
    ) -> None:
        """What the next `attend` needs: slots (B, t) and the mask (B, 1, t, longest), if any."""
        self._slots, self._longest, self._max_tokens = slots, longest, max_tokens
        self._mask, self._is_causal = mask, is_causal

    def keep(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            index = sent(rows, self.keys.device)
            self.keys, self.values = self.keys[index], self.values[index]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v and the result are (B, H, t, K); every new token sees its past and itself."""
        if self.keys is None or self.values is None:
            B, H, _, K = k.shape
            # Zeros: what no row has written yet is masked, and 0 * nan would still be nan.
            self.keys = k.new_zeros(B, self._max_tokens + 1, H, K)
            self.values = torch.zeros_like(self.keys)
        rows = torch.arange(len(k), device=k.device)[:, None]
        self.keys[rows, self._slots] = k.transpose(1, 2)
        self.values[rows, self._slots] = v.transpose(1, 2)
        past_k, past_v = (x[:, : self._longest].transpose(1, 2) for x in (self.keys, self.values))
        return F.scaled_dot_product_attention(
            q, past_k, past_v, attn_mask=self._mask, is_causal=self._is_causal
        )
