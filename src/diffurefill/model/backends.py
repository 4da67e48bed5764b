"""Which attention backend can run where, and which one to take: plain rules on plain values.

| backend  | runs on                                      | taken by default                    |
|----------|----------------------------------------------|-------------------------------------|
| `loop`   | CPU; documents in one piece                  | CPU, where it saves work            |
| `flex`   | CUDA from sm_80 on (CPU: forward only, slow) | training on CUDA from sm_80 on      |
| `varlen` | CUDA from sm_80 on, 16-bit, torch >= 2.11    | where `fastest_backend` measures it |
| `sdpa`   | everywhere                                   | the rest: T4, scoring, decoding     |
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import NamedTuple

import torch

from diffurefill.config import UserError
from diffurefill.model.segments import Backend, Documents, slots_of
from diffurefill.runtime import cpu_has_amx

BACKENDS: tuple[Backend, ...] = ("sdpa", "loop", "flex", "varlen")
LOOP_POSITIONS_WITHOUT_GRADIENTS = 1024
MASK_COST = 0.03
"""Of a dense mask, over attention without one (bench/attention.py: 0.02 to 0.1)."""


class LoopCosts(NamedTuple):
    """What the loop costs beyond the (query, key) pairs of its documents, forward and backward:
    fitted to times of rows of 128 to 1,024 positions, of 28 to 500 documents."""

    start: int
    """In multiply-adds of q k^T over all heads."""
    call: int
    """Of one more document that is alone, in the same."""
    copied: int
    """Of a position put side by side with others, in pairs."""


FP32 = LoopCosts(start=10_000_000, call=500_000, copied=40)
BF16 = LoopCosts(start=16_000_000, call=2_000_000, copied=70)
BF16_WITH_AMX = LoopCosts(start=32_000_000, call=4_000_000, copied=140)
"""Of these `call` is measured; products take half as long there, the rest as long as ever."""


class Hardware(NamedTuple):
    """The part of a device that decides."""

    type: str
    capability: tuple[int, int] = (0, 0)
    """Of a CUDA device."""
    has_amx: bool = False
    """Of a CPU: matrix units for bf16."""


class Shape(NamedTuple):
    """Of q, k and v: (rows, heads, positions, head_dim) and dtype."""

    rows: int
    heads: int
    positions: int
    head_dim: int
    dtype: torch.dtype = torch.float32


def hardware_of(device: torch.device) -> Hardware:
    if device.type == "cuda":
        return Hardware("cuda", torch.cuda.get_device_capability(device))
    return Hardware(device.type, has_amx=device.type == "cpu" and cpu_has_amx())


def choose_backend(
    hardware: Hardware, shape: Shape, documents: Documents | None, *, training: bool
) -> Backend:
    """The backend by rule. `documents` is None where the ids lie on a device: no wait for them."""
    if hardware.type == "cpu" and documents is not None and documents.in_one_piece:
        return "loop" if _loop_pays(hardware, shape, documents, training) else "sdpa"
    # Each new shape compiles FlexAttention again. Training has few shapes; scoring and decoding
    # have many, and take the dense mask.
    if training and hardware.type == "cuda" and why_not("flex", hardware, shape) is None:
        return "flex"
    return "sdpa"


def _loop_pays(hardware: Hardware, shape: Shape, documents: Documents, training: bool) -> bool:
    if not training and shape.positions < LOOP_POSITIONS_WITHOUT_GRADIENTS:
        return False  # what is decoded must not hang on what else is in the batch
    costs = FP32
    if shape.dtype == torch.bfloat16:
        costs = BF16_WITH_AMX if hardware.has_amx else BF16
    slots, is_alone = slots_of(documents, shape.dtype)
    pairs = (slots**2)[documents.table[:, 3] == 0].sum() + slots[~is_alone].sum() * costs.copied
    saved = (1 + MASK_COST) * shape.rows * shape.positions**2 - pairs
    return saved * shape.heads * shape.head_dim > costs.start + is_alone.sum() * costs.call


def why_not(
    backend: Backend, hardware: Hardware, shape: Shape, *, training: bool = True
) -> str | None:
    """Why `backend` cannot run there, in words that end with what to do; None where it can."""
    if backend == "sdpa":
        return None
    if backend == "loop":
        return None if hardware.type == "cpu" else "the loop backend runs on CPU only: ask for sdpa"
    if backend == "flex":
        return _why_not_flex(hardware, shape, training)
    return _why_not_varlen(hardware, shape)


def _why_not_flex(hardware: Hardware, shape: Shape, training: bool) -> str | None:
    if hardware.type == "cpu":
        return "FlexAttention cannot train on CPU: ask for sdpa or loop" if training else None
    if hardware.type != "cuda" or hardware.capability < (8, 0):
        return f"FlexAttention needs CUDA from sm_80 on, not {_name(hardware)}: ask for sdpa"
    if not 16 <= shape.head_dim <= 256:
        return f"FlexAttention takes head dims of 16 to 256, not {shape.head_dim}: ask for sdpa"
    return None


def _why_not_varlen(hardware: Hardware, shape: Shape) -> str | None:
    if hardware.type != "cuda" or hardware.capability < (8, 0):
        other = "loop" if hardware.type == "cpu" else "sdpa"
        return f"varlen attention needs CUDA from sm_80 on, not {_name(hardware)}: ask for {other}"
    if not has_varlen():
        return f"varlen attention needs torch 2.11, this is {torch.__version__}: ask for flex"
    if shape.head_dim % 8 or shape.head_dim > 256:
        return (
            "varlen attention takes head dims up to 256 that 8 divides, "
            f"not {shape.head_dim}: ask for sdpa"
        )
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"varlen attention needs float16 or bfloat16, not {shape.dtype}: ask for flex"
    return None


def check_backend(backend: Backend, hardware: Hardware, shape: Shape, *, training: bool) -> None:
    """UserError where `backend` cannot run."""
    if backend not in BACKENDS:
        raise UserError(f"no attention backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    reason = why_not(backend, hardware, shape, training=training)
    if reason is not None:
        raise UserError(reason)


@functools.cache
def has_varlen() -> bool:
    """Whether torch has `varlen_attn` with the arguments that we give: that of 2.10 has others."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def _name(hardware: Hardware) -> str:
    major, minor = hardware.capability
    return f"sm_{major}{minor}" if hardware.type == "cuda" else hardware.type
