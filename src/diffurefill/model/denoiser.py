"""The transformer: canvas -> logits. With `causal=True` the same parameters make the AR twin.

Pre-norm blocks of rotary attention and SwiGLU, a final norm and a head tied to the embedding;
no biases. Shape letters: B rows, T positions, D width, H heads, K head dim, V vocabulary, N
positions whose logits are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffurefill.config import ModelConfig, UserError
from diffurefill.model.attention import Backend, Segments, attention, plan_segments
from diffurefill.model.backends import Shape
from diffurefill.model.kv_cache import CachedLayer, KVCache
from diffurefill.model.passes import rms_norm, rotated, swiglu
from diffurefill.runtime import sent


def num_parameters(config: ModelConfig) -> int:
    """Parameters of `Denoiser(config)`, the tied embedding counted once."""
    D = config.width
    per_block = 4 * D * D + 3 * D * config.ffn_width + 2 * D
    return config.vocab_size * D + config.layers * per_block + D


class BlockCalls(NamedTuple):
    """Functions of a block and its arguments: compiled, one graph of each serves all blocks."""

    inner: Callable[..., Tensor]
    last: Callable[..., Tensor]
    """With `wanted`, whose length changes from step to step."""


def call_block(block: Block, x: Tensor, rotary: Tensor, segments: Segments | CachedLayer) -> Tensor:
    return block(x, rotary, segments)


def call_last_block(
    block: Block,
    x: Tensor,
    rotary: Tensor,
    segments: Segments | CachedLayer,
    wanted: Tensor | None,
) -> Tensor:
    return block(x, rotary, segments, wanted)


EAGER = BlockCalls(call_block, call_last_block)


class Denoiser(nn.Module):
    """A distribution over the vocabulary at every wanted position of a canvas.

    All matrices are zero until `init_weights` or `load_state_dict` fills them: building the module
    draws nothing from torch's global generator.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        weight = torch.zeros(config.vocab_size, config.width)
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        self.attention_backend: Backend | None = None
        """The backend that training takes; None: by device, shape and documents."""
        self.training_calls = EAGER
        """How blocks run where gradients are wanted; compiled by compiling.py."""
        self.writing_calls = EAGER
        """And where none are, but for a kept past. Scoring and decoding come in many shapes: eager
        unless somebody asks."""
        # No buffer: neither `.to(bfloat16)`, which would ruin the angles, nor a checkpoint sees it.
        self._rotary: Tensor | None = None

    def forward(
        self,
        canvas: Tensor,
        doc_ids: Tensor | None = None,
        at: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits (B, T, V) of `canvas` (B, T), or (N, V) at the positions that `at` selects.

        doc_ids: (B, T), -1 on PAD, on the CPU or where the canvas is; None when each row is one
        document.
        at: (B, T) bool, on any device: the True positions, row-major. Or (N,) int64, indices into
        the B * T positions, where the canvas is: nobody then waits for a GPU to count them. The
        head is a large share of the work: name the positions that matter.
        cache: the past of a causal model, which `canvas` continues; it takes these tokens in.
        """
        wanted = at  # (N,) of B * T
        if at is not None and at.dtype == torch.bool:
            # Counted where `at` is: on the CPU, so that nobody waits for a GPU to count it.
            wanted = sent(at.flatten().nonzero().squeeze(1), canvas.device)
        return F.linear(self.hidden(canvas, doc_ids, wanted, cache), self.embedding.weight)

    def hidden(
        self,
        canvas: Tensor,
        doc_ids: Tensor | None = None,
        wanted: Tensor | None = None,
        cache: KVCache | None = None,
        recomputed_blocks: int = 0,
    ) -> Tensor:
        """What the head turns into logits, normed: (B, T, D), or (N, D) at `wanted`, indices into
        the B * T positions, where the canvas is.

        recomputed_blocks: so many blocks, from the first on, keep their input alone and run again
        in the backward pass.
        """
        x = self.embedding(canvas)  # (B, T, D)
        if torch.is_autocast_enabled(x.device.type):
            # Autocast leaves the lookup in fp32, and so would be every residual sum after it.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rotary, pasts = self._mixing(canvas, doc_ids, cache)
        calls = self.training_calls if torch.is_grad_enabled() else self.writing_calls
        *blocks, last_block = self.blocks
        for i, (block, segments) in enumerate(zip(blocks, pasts, strict=False)):
            x = _run(calls.inner, block, x, rotary, segments, recomputed=i < recomputed_blocks)
        ends = (x, rotary, pasts[-1], wanted)
        x = _run(calls.last, last_block, *ends, recomputed=len(blocks) < recomputed_blocks)
        return self.final_norm(x)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """N(0, 0.02); the outputs into the residual stream N(0, 0.02 / sqrt(2 layers)); gains 1.

        Drawn on the generator's device in the order of `named_parameters`, so that a seed gives
        the same weights wherever the model lives.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            is_residual = name.endswith(("attention_out.weight", "down.weight"))
            drawn = torch.empty(parameter.shape, device=generator.device)
            std = residual_std if is_residual else 0.02
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))

    def _mixing(
        self, canvas: Tensor, doc_ids: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Sequence[Segments | CachedLayer]]:
        """Rotary angles of the positions, and what every block's positions may look at."""
        if cache is None:
            rotary = self._rotary_table(canvas.shape[1], canvas.device)
            return rotary, [self._segments(doc_ids, canvas.device)] * len(self.blocks)
        if not self.config.causal:
            raise UserError("only a causal model has a past to keep: a denoiser reads whole rows")
        positions = cache.extend(doc_ids, canvas.shape[1], canvas.device)
        table = self._rotary_table(cache.max_tokens, canvas.device)
        return table[:, positions].unsqueeze(2), cache.layers  # (2, B, 1, T, K / 2)

    def _segments(self, doc_ids: Tensor | None, device: torch.device) -> Segments:
        training, weight = torch.is_grad_enabled(), self.embedding.weight
        is_autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_autocast else weight.dtype
        B, T = (0, 0) if doc_ids is None else doc_ids.shape
        heads = self.config.heads
        return plan_segments(
            doc_ids,
            Shape(B, heads, T, self.config.width // heads, dtype),
            device,
            causal=self.config.causal,
            training=training,
            backend=self.attention_backend if training else None,
        )

    def _rotary_table(self, num_positions: int, device: torch.device) -> Tensor:
        table = self._rotary
        if table is None or table.device != device or table.shape[1] < num_positions:
            head_dim = self.config.width // self.config.heads
            # A table first made under inference_mode could not be used in training later.
            with torch.inference_mode(False):
                table = rotary_table(num_positions, head_dim, self.config.rope_base).to(device)
            self._rotary = table
        # A copy: to a compiled block a view of a longer table would be another graph.
        return table[:, :num_positions].clone(memory_format=torch.contiguous_format)


def _run(call: Callable[..., Tensor], *args: Any, recomputed: bool) -> Tensor:
    """`call(*args)`; `recomputed`: and again in the backward pass, from `args` alone."""
    if recomputed:
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)
    return call(*args)


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); x is (B, T, D).

    `wanted` (N,), indices into the B * T positions, returns those alone, (N, D): past the mixing
    of positions nothing depends on the others, so the last block is spared most of their work.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.attention_norm = RMSNorm(D, config.norm_eps)
        self.qkv = Linear(D, 3 * D)
        self.attention_out = Linear(D, D)
        self.ffn_norm = RMSNorm(D, config.norm_eps)
        self.gate_up = Linear(D, 2 * config.ffn_width)
        self.down = Linear(config.ffn_width, D)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        segments: Segments | CachedLayer,
        wanted: Tensor | None = None,
    ) -> Tensor:
        mixed = self._mix(self.attention_norm(x), rotary, segments)
        if wanted is not None:
            x = x.flatten(0, 1).index_select(0, wanted)  # (N, D)
            mixed = mixed.flatten(0, 1).index_select(0, wanted)
        x = x + self.attention_out(mixed)
        return x + self.down(swiglu(self.gate_up(self.ffn_norm(x))))

    def _mix(self, x: Tensor, rotary: Tensor, segments: Segments | CachedLayer) -> Tensor:
        """What each position gathers from its segment, (B, T, D)."""
        B, T, D = x.shape
        q, k, v = rotated(self.qkv(x).view(B, T, 3, self.heads, D // self.heads), rotary)
        if isinstance(segments, CachedLayer):
            mixed = segments.attend(q, k, v)
        else:
            mixed = attention(q, k, v, segments)
        return mixed.transpose(1, 2).reshape(B, T, D)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 and returned in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight.float(), self.eps).to(x.dtype)


class Linear(nn.Linear):
    """No bias, and zero until filled: torch's own start would draw from its global generator."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def rotary_table(num_positions: int, head_dim: int, base: float) -> Tensor:
    """Cosines and sines (2, T, K / 2) of position * base^(-2 i / K): fp64 angles, kept in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    positions = torch.arange(num_positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, base**-exponents)
    return torch.stack((angles.cos(), angles.sin())).float()
