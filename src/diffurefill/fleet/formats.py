"""How one fp32 tensor of a delta is stored: as it is, in bf16, or as few-bit integers with scales.

A format turns flat fp32 elements into pieces of one or two stored tensors and back, some elements
at a time. Decoding is a cast and one fp32 multiplication, so it gives the same bits on every
machine; encoding runs on the device of its input and needs no such promise: what was encoded is
what everybody decodes. Source: spec fleet.md 2.2, 2.4 B.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]
Stored = dict[str, tuple[str, Shape]]
"""{suffix of the stored tensor's name: (dtype name, shape)}; the suffix of the values is ''."""
Pieces = dict[str, Tensor]
"""{suffix: flat elements of the stored tensor}"""

SCALE = ":scale"
BLOCK = 32
"""Elements of the int4 format that share a scale."""


class Format(Protocol):
    """How one tensor of a given shape is stored."""

    stored: Stored
    unit: int
    """Elements that are encoded together: pieces to encode start at a multiple of it."""

    def encode(self, delta: Tensor) -> Pieces:
        """Flat fp32 elements (whole units, or up to the tensor's end) as stored."""
        ...

    def ranges(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        """What must be read of each stored tensor to decode elements [start, stop)."""
        ...

    def decode(self, pieces: Pieces, start: int, out: Tensor) -> Tensor:
        """Fill `out` (flat fp32) with elements from `start` on, given the pieces of `ranges`."""
        ...


class Plain:
    """One element after another, in fp32 or rounded to bf16."""

    unit = 1

    def __init__(self, shape: Shape, dtype: str) -> None:
        self.stored: Stored = {"": (dtype, shape)}
        self._dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]

    def encode(self, delta: Tensor) -> Pieces:
        return {"": delta.to(self._dtype)}

    def ranges(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        return {"": (start, stop)}

    def decode(self, pieces: Pieces, start: int, out: Tensor) -> Tensor:
        return out.copy_(pieces[""])


class RowInt8:
    """int8 with one fp32 scale for each row: the first dimension against all others.

    Symmetric, rounded to the nearest (ties to even), scale = max |row| / 127; so an element is off
    by half a scale at most.
    """

    def __init__(self, shape: Shape) -> None:
        self.unit = math.prod(shape[1:])
        self.stored: Stored = {"": ("I8", shape), SCALE: ("F32", shape[:1])}

    def encode(self, delta: Tensor) -> Pieces:
        values, scales = _quantise(delta.view(-1, self.unit), 127)
        return {"": values.to(torch.int8).flatten(), SCALE: scales}

    def ranges(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        return {"": (start, stop), SCALE: (start // self.unit, -(-stop // self.unit))}

    def decode(self, pieces: Pieces, start: int, out: Tensor) -> Tensor:
        scales, cols = pieces[SCALE], self.unit
        out.copy_(pieces[""])
        head = min(-start % cols, len(out))  # the rest of a row that began before
        rows = (len(out) - head) // cols
        tail = head + rows * cols
        first = 1 if head else 0
        out[:head].mul_(scales[:1])
        out[head:tail].view(rows, cols).mul_(scales[first : first + rows, None])
        out[tail:].mul_(scales[-1:])
        return out


class BlockInt4:
    """An experiment: 4 bits an element, with one bf16 scale for each 32 consecutive elements.

    Symmetric in [-7, 7], scale = max |block| / 7; two elements a byte, the first in the low half,
    each plus 8. The last block is filled up with zeros. The relative error of a delta is about
    12% (spec fleet.md 2.2): noise that a mean over workers divides, but no default.
    """

    unit = BLOCK

    def __init__(self, shape: Shape) -> None:
        num_blocks = -(-math.prod(shape) // BLOCK)
        self.stored: Stored = {"": ("U8", (num_blocks, BLOCK // 2)), SCALE: ("BF16", (num_blocks,))}

    def encode(self, delta: Tensor) -> Pieces:
        padded = torch.nn.functional.pad(delta, (0, -len(delta) % BLOCK))
        values, scales = _quantise(padded.view(-1, BLOCK), 7, torch.bfloat16)
        values = (values + 8).to(torch.uint8)
        return {"": (values[:, 0::2] | values[:, 1::2] << 4).flatten(), SCALE: scales}

    def ranges(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        first, last = start // BLOCK, -(-stop // BLOCK)
        return {"": (first * BLOCK // 2, last * BLOCK // 2), SCALE: (first, last)}

    def decode(self, pieces: Pieces, start: int, out: Tensor) -> Tensor:
        packed = pieces[""].view(-1, BLOCK // 2)
        values = torch.stack((packed & 15, packed >> 4), dim=2).float().sub_(8.0)
        decoded = values.view(-1, BLOCK).mul_(pieces[SCALE].float()[:, None])
        return out.copy_(decoded.flatten()[start % BLOCK :][: len(out)])


def _quantise(
    groups: Tensor, limit: int, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(n, size) fp32 -> whole numbers in [-limit, limit] as fp32, and scales (n,).

    A group that is not finite gets a scale that is not: what is decoded shows it.
    """
    scales = (groups.abs().amax(1) / limit).to(scale_dtype)
    # Machines differ in whether they keep numbers below the smallest normal one.
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales).to(scale_dtype)
    values = torch.round(groups / scales.float()[:, None]).clamp_(-limit, limit)
    return torch.nan_to_num_(values, nan=0.0), scales  # 0 / 0 in a group of zeros


FORMATS = {
    "fp32-delta": lambda shape: Plain(shape, "F32"),
    "bf16-delta": lambda shape: Plain(shape, "BF16"),
    "int8-delta": lambda shape: RowInt8(shape) if _is_large(shape) else Plain(shape, "F32"),
    "int4-delta": lambda shape: BlockInt4(shape) if _is_large(shape) else Plain(shape, "F32"),
}
"""Codec name -> the format of a tensor, given its shape."""


def _is_large(shape: Shape) -> bool:
    """Vectors stay in fp32: gains are a ten-thousandth of a model and touch every position."""
    return len(shape) >= 2 and math.prod(shape) > 0
