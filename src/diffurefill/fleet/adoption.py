"""Keep-drift adoption: a worker keeps the steps it took since its push on top of the new global.

Not the default: what the workers disagree in is then never divided by their number, and at a high
learning rate it piles up (spec fleet.md 2.5). Source: spec algorithms.md 3.5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from diffurefill.train.tensorfile import (
    CHUNK_ELEMENTS,
    TensorFile,
    chunks,
    require_schema,
    schema_of,
)


@torch.no_grad()
def keep_drift(
    params: Mapping[str, Tensor],
    pushed: Path,
    new_global: Path,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> None:
    """theta_w <- theta_w + (global - theta_pushed), in place, for contiguous fp32 tensors.

    `pushed` holds the weights, not the delta, that were pushed. Without a step since then the
    result is the new global up to the last bits: x + (g - x) rounds twice, and is exactly g where
    g lies between x / 2 and 2 x. Holds two chunks. Raises ValueError, before anything is changed,
    when the tensors differ or one is not contiguous.
    """
    with contextlib.ExitStack() as stack:
        new = stack.enter_context(TensorFile(new_global))
        old = stack.enter_context(TensorFile(pushed))
        require_schema(old.schema, new.schema, pushed)
        require_schema(schema_of(params), new.schema, "the worker's weights")
        for name, tensor in params.items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous: it cannot be updated in place")
        a, b = torch.empty(2, chunk_elements)
        for name, start, stop in chunks(new.schema, chunk_elements):
            moved = new.read(name, start, a[: stop - start])
            moved.sub_(old.read(name, start, b[: stop - start]))
            flat = params[name].detach().view(-1)
            flat[start:stop].add_(moved.to(flat.device))
