"""Which attention backend can run where, and which one to take: plain rules on plain values.

| backend  | runs on                                      | taken by default                    |
|----------|----------------------------------------------|-------------------------------------|
| `loop`   | CPU; documents in one piece                  | CPU, where it saves work            |
| `flex`   | CUDA from sm_80 on (CPU: forward only, slow) | training on CUDA from sm_80 on      |
| `varlen` | CUDA from sm_80 on, 16-bit, torch >= 2.10    | where `fastest_backend` measures it |
| `sdpa`   | everywhere                                   | the rest: T4, scoring, decoding     |
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from diffurefill.config import UserError
from diffurefill.model.segments import Backend, Documents

BACKENDS: tuple[Backend, ...] = ("sdpa", "loop", "flex", "varlen")
LOOP_SCORES_PER_DOCUMENT = 500_000
"""What one more range costs the loop, in multiply-adds of q k^T over all heads (bench/attention.py:
between 250,000 and 570,000, forward and backward, in fp32)."""
LOOP_BF16 = 8
"""By how much more in bf16, whose products are short and whose gradients take more operators."""
LOOP_PAIRS_PER_POSITION = 16
"""What copying results into place costs, in (query, key) pairs per position."""
LOOP_POSITIONS_WITHOUT_GRADIENTS = 1024


class Hardware(NamedTuple):
    """The part of a device that decides: its type, and on CUDA its compute capability."""

    type: str
    capability: tuple[int, int] = (0, 0)


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
    return Hardware(device.type)


def choose_backend(
    hardware: Hardware, shape: Shape, documents: Documents | None, *, training: bool
) -> Backend:
    """The backend by rule. `documents` is None where the ids lie on a device: no wait for them."""
    if hardware.type == "cpu" and documents is not None and documents.in_one_piece:
        return "loop" if _loop_pays(shape, documents, training) else "sdpa"
    # Each new shape compiles FlexAttention again. Training has few shapes; scoring and decoding
    # have many, and take the dense mask.
    if training and hardware.type == "cuda" and why_not("flex", hardware, shape) is None:
        return "flex"
    return "sdpa"


def _loop_pays(shape: Shape, documents: Documents, training: bool) -> bool:
    if not training and shape.positions < LOOP_POSITIONS_WITHOUT_GRADIENTS:
        return False  # what is decoded must not hang on what else is in the batch
    positions = shape.rows * shape.positions
    saved = positions * (shape.positions - LOOP_PAIRS_PER_POSITION) - documents.num_pairs
    factor = LOOP_BF16 if shape.dtype == torch.bfloat16 else 1
    calls = len(documents.table) * LOOP_SCORES_PER_DOCUMENT * factor
    return saved * shape.heads * shape.head_dim > calls


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
        return f"varlen attention needs torch 2.10, this is {torch.__version__}: ask for flex"
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


def has_varlen() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def _name(hardware: Hardware) -> str:
    major, minor = hardware.capability
    return f"sm_{major}{minor}" if hardware.type == "cuda" else hardware.type
