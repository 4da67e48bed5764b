"""Forward and backward of a step's rows, micro-batch by micro-batch.

How it is computed differs by device and precision. What comes out does not, but for rounding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.config import TrainConfig
from diffurefill.model.denoiser import Denoiser
from diffurefill.objective.corruption import Corrupted
from diffurefill.objective.head import CHUNK_BYTES, head_cross_entropy
from diffurefill.runtime import sent, training_dtype

PAD_TO = 1024
PAD_TO_ON_CPU = 128
"""In bf16: the library behind the products makes code for every shape and keeps that of a thousand,
which is gigabytes even for a small model."""


@dataclass(frozen=True)
class Arithmetic:
    dtype: torch.dtype | None
    """Of products and of what lies between them; None: fp32, as the weights are."""
    chunk_bytes: int | None
    """Of logits at once; None: all of a micro-batch, which a CPU does faster."""
    pad_to: int
    """Masked positions of a micro-batch are filled up to a multiple: few shapes are met, and code
    is made for few."""
    activation_budget: float = 1.0
    """Share of the blocks that keep their activations."""


def arithmetic_of(device: torch.device, config: TrainConfig) -> Arithmetic:
    """Raises UserError for a precision that the device does not have."""
    dtype, budget = training_dtype(device, config.precision), config.activation_budget
    if device.type == "cuda":
        return Arithmetic(dtype, CHUNK_BYTES, PAD_TO, budget)
    return Arithmetic(dtype, None, 1 if dtype is None else PAD_TO_ON_CPU, budget)


def accumulate(
    model: Denoiser,
    how: Arithmetic,
    corrupted: Corrupted,
    doc_ids: Tensor,
    weights: Tensor,
    micro_batch_rows: int,
) -> tuple[Tensor, Tensor]:
    """Adds the gradients of sum(weights * ce) to the parameters'; returns that sum, (), and the
    summed ce of each row, or part of a short row, (P,).

    corrupted, doc_ids (B, T) and weights (B, T) lie on the CPU, and hold all rows of the step.
    """
    device = model.embedding.weight.device
    loss, part_ce = torch.zeros((), device=device), torch.zeros(len(corrupted.t), device=device)
    # One context for all of them: it keeps the weights' 16-bit copies, made once a step.
    with autocast(device, how.dtype):
        cast = head_copy(model, how)
        for part in torch.arange(len(doc_ids)).split(micro_batch_rows):
            at = corrupted.is_masked[part]
            num_masked = int(at.sum())
            if num_masked == 0:
                continue
            wanted = padded_positions(at, how.pad_to)
            extra = (0, len(wanted) - num_masked)
            canvas, wanted, targets, weight, parts = (
                sent(x, device)
                for x in (
                    corrupted.canvas[part],
                    wanted,
                    F.pad(corrupted.targets[part][at], extra),
                    F.pad(weights[part][at], extra),
                    corrupted.parts[part][at],
                )
            )
            # Documents stay on the CPU: what is counted there needs no waiting.
            part_loss, ce = forward_backward(
                model, how, canvas, doc_ids[part], wanted, targets, weight, cast
            )
            loss += part_loss
            part_ce.index_add_(0, parts, ce[:num_masked])
    return loss, part_ce


def forward_backward(
    model: Denoiser,
    how: Arithmetic,
    canvas: Tensor,
    doc_ids: Tensor | None,
    wanted: Tensor,
    targets: Tensor,
    weights: Tensor,
    cast: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One micro-batch, inside `autocast`: the weighted sum, (), and ce (N,) at the N `wanted`."""
    kept = int(how.activation_budget * len(model.blocks) + 1e-9)
    recomputed = len(model.blocks) - kept
    hidden = model.hidden(canvas, doc_ids, wanted, recomputed_blocks=recomputed)
    loss, ce = head_cross_entropy(
        hidden,
        model.embedding.weight,
        targets,
        weights,
        cast=cast,
        chunk_bytes=how.chunk_bytes,
    )
    with autocast(canvas.device, None):
        loss.backward()
    return loss.detach(), ce


@torch.no_grad()
def predicted(
    model: Denoiser, how: Arithmetic, canvas: Tensor, doc_ids: Tensor, at: Tensor
) -> Tensor:
    """Logits (N, V) float32 at the True positions of `at`, where the model is; no gradients."""
    device = model.embedding.weight.device
    with autocast(device, how.dtype):
        return model(canvas.to(device), doc_ids, at).float()


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Products in `dtype`; None: in fp32, or, inside of another such context, as they come."""
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def head_copy(model: Denoiser, how: Arithmetic) -> Tensor | None:
    """The head's weights for products by chunks; all at once, autocast keeps its own copy."""
    if how.dtype is None or how.chunk_bytes is None:
        return None
    return model.embedding.weight.detach().to(how.dtype)


def padded_positions(at: Tensor, multiple: int) -> Tensor:
    """Where `at` (B, T) is True, as indices into B * T, and others behind them up to a multiple of
    `multiple`, B * T at most. What is filled in gets weight 0, and so no gradient."""
    found = at.flatten().nonzero().squeeze(1)
    length = min(-(-len(found) // multiple) * multiple, at.numel())
    return torch.cat((found, torch.arange(length - len(found), device=at.device)))
