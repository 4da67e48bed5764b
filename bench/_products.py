"""The matrix products of a layer alone, for bench/train.py: what no step can do without."""

from __future__ import annotations

import torch


class Products:
    """x (..., n, i), w (..., o, i): the three products of one layer, into tensors made before."""

    def __init__(self, x: tuple[int, ...], w: tuple[int, ...], dtype: torch.dtype) -> None:
        self.x, self.w = torch.randn(x).to(dtype), torch.randn(w).to(dtype)
        self.y = self.x @ self.w.mT
        self.dy = torch.randn_like(self.y)
        self.dx, self.dw = torch.empty_like(self.x), torch.empty_like(self.w)

    def forward_and_backward(self) -> None:
        torch.matmul(self.x, self.w.mT, out=self.y)
        torch.matmul(self.dy, self.w, out=self.dx)
        torch.matmul(self.dy.mT, self.x, out=self.dw)
