"""The chain rule with states that stay as they first were, a token and a row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diffurefill.model.denoiser import Denoiser, rotary_table
from tests.fakes import BOS, MASK


class FrozenChain:
    """Keys and values of what is visible, layer by layer; nobody computes them again."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.keys: list[list[Tensor]] = [[] for _ in denoiser.blocks]
        self.values: list[list[Tensor]] = [[] for _ in denoiser.blocks]

    def logits(self, shown: Sequence[int], num_hidden: int) -> Tensor:
        """Of the first MASK, when `shown` becomes visible before `num_hidden` MASKs. (V,)"""
        model, start = self.denoiser, len(self.keys[0])
        ids = torch.tensor([*shown, *[MASK] * num_hidden])
        heads, K = model.config.heads, model.config.width // model.config.heads
        cos, sin = rotary_table(start + len(ids), K, model.config.rope_base)[:, start:, None]
        x = model.embedding(ids)
        for block, keys, values in zip(model.blocks, self.keys, self.values, strict=True):
            q, k, v = block.qkv(block.attention_norm(x)).view(len(ids), 3, heads, K).unbind(1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            all_k = torch.stack([*keys, *k])  # (seen, H, K)
            all_v = torch.stack([*values, *v])
            weights = torch.einsum("qhd,khd->hqk", q, all_k).div(math.sqrt(K)).softmax(dim=-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, all_v).flatten(1)
            x = x + block.attention_out(mixed)
            gate, up = block.gate_up(block.ffn_norm(x)).chunk(2, dim=-1)
            x = x + block.down(torch.nn.functional.silu(gate) * up)
            keys += k[: len(shown)]
            values += v[: len(shown)]
        return model.embedding.weight @ model.final_norm(x[len(shown)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@torch.inference_mode()
def frozen_chain(
    denoiser: Denoiser, context: Sequence[int], tokens: Sequence[int], right_masks: int = 0
) -> list[float]:
    """log p of each token."""
    chain, found = FrozenChain(denoiser), []
    for i, token in enumerate(tokens):
        shown = [BOS, *context] if i == 0 else [tokens[i - 1]]
        logits = chain.logits(shown, len(tokens) - i + right_masks)
        found.append(float(logits.log_softmax(dim=0)[token]))
    return found
