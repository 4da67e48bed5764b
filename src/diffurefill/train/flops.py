"""Floating point operations of training, the peak of a device, and the share of it that is used.

Two counts stand side by side. `six_nd` is the field's rule, 6 x parameters x tokens. `step_flops`
counts the multiplications and additions that a step cannot do without: blocks, attention inside
documents, the head at masked positions. Neither counts padding, norms or the optimiser.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np
import torch

from diffurefill.config import ModelConfig
from diffurefill.model.denoiser import num_parameters
from diffurefill.runtime import wait_for

BACKWARD = 2
"""Every product of the forward pass has two in the backward pass: by its input, by its weight."""


@dataclass(frozen=True)
class Flops:
    """Of the forward pass, by part."""

    blocks: float
    """The matrices of the blocks; attention's products are not among them."""
    attention: float
    head: float

    @property
    def forward(self) -> float:
        return self.blocks + self.attention + self.head

    @property
    def training(self) -> float:
        """Forward and backward, nothing computed twice."""
        return (1 + BACKWARD) * self.forward

    def per(self, num_tokens: float) -> Flops:
        """The share of one token."""
        tokens = max(num_tokens, 1)
        return Flops(self.blocks / tokens, self.attention / tokens, self.head / tokens)


def six_nd(config: ModelConfig) -> float:
    """FLOPs per trained token by the rule: six a parameter, the tied embedding counted once."""
    return 6.0 * num_parameters(config)


def step_flops(
    config: ModelConfig, *, num_tokens: float, num_masked: float, num_pairs: float
) -> Flops:
    """FLOPs of one forward pass over `num_tokens` tokens, padding excluded.

    `num_masked` positions go through the head, and they alone through what follows attention in
    the last block, as the denoiser does it. `num_pairs`: (query, key) pairs that may see each
    other, from `visible_pairs`.
    """
    D, F = config.width, config.ffn_width
    mixing, rest = 3 * D * D, D * D + 3 * D * F  # qkv; attention's output, then SwiGLU
    everywhere = config.layers * mixing + (config.layers - 1) * rest
    return Flops(
        blocks=2.0 * (everywhere * num_tokens + rest * num_masked),
        attention=4.0 * D * config.layers * num_pairs,  # q k^T and the sum over v, all heads
        head=2.0 * config.vocab_size * D * num_masked,
    )


def visible_pairs(doc_ids: np.ndarray, *, causal: bool = False) -> int:
    """(query, key) pairs inside documents; `doc_ids` (B, T), -1 on PAD, which counts nothing."""
    changes = np.ones(doc_ids.shape, dtype=bool)
    changes[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    starts = np.flatnonzero(changes)
    lengths = np.diff(np.append(starts, doc_ids.size))[doc_ids.ravel()[starts] >= 0]
    lengths = lengths.astype(np.int64)
    return int((lengths * (lengths + 1) // 2 if causal else lengths**2).sum())


# --- what a device could do ----------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    flops: float
    """Per second."""
    what: str
    """How the figure was come by, for the report."""


# Dense 16-bit tensor-core TFLOP/s with fp32 accumulation, from the makers' datasheets. Datasheets
# print many cards with 2:4 sparsity: those figures are halved here. First match wins.
_DATASHEET = (
    # NVIDIA RTX Blackwell PRO GPU architecture whitepaper
    (r"RTX PRO 6000.*Max-Q", 438.9),
    (r"RTX PRO 6000", 503.8),
    # NVIDIA Blackwell architecture technical brief
    (r"\bB200\b", 2250.0),
    # NVIDIA H200, GH200 and H100 datasheets (SXM, NVL and PCIe differ)
    (r"\bH200 NVL\b", 835.5),
    (r"\b(H200|GH200)\b", 989.4),
    (r"\bH100 PCIe\b", 756.5),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100\b", 989.4),
    # NVIDIA A100 and A10 datasheets
    (r"\bA100\b", 312.0),
    (r"\bA10\b", 125.0),
    # NVIDIA Ada datasheets: L40S, L40, L4; Ada GPU architecture whitepaper: RTX 4090
    (r"\bL40S\b", 362.05),
    (r"\bL40\b", 181.05),
    (r"\bL4\b", 121.0),
    (r"RTX 4090\b(?! D| Laptop)", 165.2),
    # NVIDIA T4 and V100 datasheets: fp16, bf16 does not exist there
    (r"\bT4\b", 65.0),
    (r"\bV100-SXM2", 125.0),
    (r"\bV100-PCIE", 112.0),
)


def datasheet_peak(name: str) -> Peak | None:
    """Of the card that calls itself `name`; None where we have no figure.

    A MIG slice has the card's name and a part of its units: no figure either.
    """
    if "MIG" in name:
        return None
    for pattern, teraflops in _DATASHEET:
        if re.search(pattern, name):
            return Peak(teraflops * 1e12, f"datasheet, dense 16-bit: {teraflops:g} TFLOP/s")
    return None


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The datasheet's figure, else what a large product in `dtype` reaches now."""
    if device.type == "cuda":
        known = datasheet_peak(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return measured_peak(device, dtype)


def measured_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.25) -> Peak:
    """The best of repeated square products, random data: zeros would draw less power and clock
    higher. Takes about `seconds`, with as many threads as torch has.

    On a CPU in CPU seconds: what the cores could do, whoever else uses them now.
    """
    on_cpu = device.type == "cpu"
    n, clock = (1024, time.process_time) if on_cpu else (8192, time.perf_counter)
    generator = torch.Generator(device).manual_seed(0)  # its own: a run's draws are not ours
    a, b = (torch.randn(n, n, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.mm(a, b)
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        wait_for(device)
        began = clock()
        torch.mm(a, b, out=out)
        wait_for(device)
        best = min(best, clock() - began)
        if time.perf_counter() > end:
            break
    threads = torch.get_num_threads() if on_cpu else 1
    flops = 2.0 * n**3 * threads / best
    kind = str(dtype).removeprefix("torch.") + (f", {threads} threads" if on_cpu else "")
    return Peak(flops, f"measured {n} x {n} product, {kind}: {flops / 1e12:.3g} TFLOP/s")


def measured_bandwidth(device: torch.device, *, seconds: float = 0.25) -> float:
    """Bytes a second at which `device` reads what is too large for its caches: the best of repeated
    sums. On a CPU in CPU seconds, as `measured_peak`."""
    on_cpu = device.type == "cpu"
    num_bytes, clock = (1 << 28, time.process_time) if on_cpu else (1 << 30, time.perf_counter)
    read = torch.ones(num_bytes // 4, device=device)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        wait_for(device)
        began = clock()
        read.sum()
        wait_for(device)
        best = min(best, clock() - began)
    return num_bytes * (torch.get_num_threads() if on_cpu else 1) / best


def utilisation(flops_per_token: float, tokens_per_second: float, peak: Peak) -> float:
    """MFU in [0, 1] by whichever count of FLOPs is given."""
    return flops_per_token * tokens_per_second / peak.flops
