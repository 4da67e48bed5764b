"""Where the open positions of a canvas lie, found without counting them on the device.

Their number has an upper bound that the host knows (counts.py). So many slots are filled with the
open positions in row-major order; what is read at the surplus ones is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.decode.counts import Counts


@dataclass(frozen=True, eq=False)
class Slots:
    """N slots for the True positions of a mask (B, T)."""

    counts: Counts
    """Of each row; N is their upper bound."""
    to: Tensor
    """(N,) of B * T, where to write; B * T, behind the last position, for surplus slots."""
    of: Tensor
    """(N,) of B * T, where to read; a surplus slot reads what the first does."""

    @classmethod
    def at(cls, mask: Tensor, counts: Counts) -> Slots:
        sink = mask.numel()
        to = _first_true(mask.flatten(), counts.total)
        return cls(counts, to, torch.where(to < sink, to, to[:1].clamp(max=sink - 1)))

    def read(self, values: Tensor) -> Tensor:
        """(N, ...) of values (B, T, ...)."""
        return values.flatten(0, 1)[self.of]

    def write(self, values: Tensor, like: Tensor) -> Tensor:
        """A copy of `like` (B, T) with values (N,) at the slots."""
        return F.pad(like.flatten(), (0, 1)).index_copy_(0, self.to, values)[:-1].view_as(like)


def _first_true(flags: Tensor, count: int) -> Tensor:
    """The indices of the first `count` True of flags (n,), in order, then n: (count,) int64.

    `nonzero_static` would say it in a word, but not every torch from 2.6 on has it for CUDA.
    """
    n = len(flags)
    sink = max(n, count)
    number = torch.where(flags, flags.cumsum(dim=0) - 1, sink)
    index = torch.arange(n, device=flags.device)
    return index.new_full((sink + 1,), n).scatter_(0, number, index)[:count]
