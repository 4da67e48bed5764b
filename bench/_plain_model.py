"""A plain eager transformer with the head on all positions, for bench/train.py to compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffurefill.config import ModelConfig


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.norm_1, self.norm_2 = (nn.RMSNorm(D, eps=config.norm_eps) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(D, config.ffn_width, bias=False) for _ in range(2))
        self.down = nn.Linear(config.ffn_width, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        h = self.norm_1(x)
        q, k, v = (
            p(h).view(B, T, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = (z * cos + half_turned(z) * sin for z in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(mixed.transpose(1, 2).reshape(B, T, D))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainModel(nn.Module):
    def __init__(self, config: ModelConfig, row_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        nn.init.normal_(self.embedding.weight, std=0.02)
        K = config.width // config.heads
        angles = torch.outer(
            torch.arange(row_length), config.rope_base ** (-torch.arange(0, K, 2) / K)
        ).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, canvas: Tensor) -> Tensor:
        x = self.embedding(canvas)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embedding.weight)
