"""One optimiser step: the page to read first.

rows -> corrupt -> denoise -> loss -> backward -> clip -> update. The masks of the whole step are
drawn before the first forward pass, so the loss's denominator is the whole step's, and the number
of micro-batches changes memory and speed, and the result by rounding alone (spec algorithms 1.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from diffurefill.config import RunConfig
from diffurefill.data.packing import Rows
from diffurefill.model.denoiser import Denoiser
from diffurefill.objective.corruption import Corrupted, Key, corrupt
from diffurefill.objective.loss import token_weights
from diffurefill.objective.next_token import next_token
from diffurefill.objective.self_repair import self_repair
from diffurefill.optim.adamw import RunOptimizer
from diffurefill.optim.loss_scale import LossScale
from diffurefill.optim.schedule import learning_rate
from diffurefill.train.gradients import Arithmetic, accumulate, arithmetic_of, predicted
from diffurefill.train.micro_batch import MicroBatch


@dataclass(frozen=True)
class StepResult:
    """One step's figures. Tensors stay on the device until a number is asked for."""

    loss: Tensor
    """As weighted in training, ()."""
    grad_norm: Tensor
    """Global norm before clipping, ()."""
    part_ce: Tensor
    """(P,) summed CE of the masked tokens of each row, or part of a short row, in nats."""
    corrupted: Corrupted
    learning_rate: float
    num_tokens: int
    """Real tokens of the step's rows, padding excluded."""
    loss_scale: float | None = None
    """Of the gradients while they were computed; None but in float16."""
    is_skipped: bool = False
    """The factor was too large for the gradients: no weight has moved."""

    @property
    def num_masked(self) -> int:
        return int(self.corrupted.is_masked.sum())

    def metrics(self) -> dict[str, Tensor | float | int]:
        """`masked_ce` is in nats per masked token, whatever the loss weighting.

        Tensors are on the device still: `float` of one waits for the step to be done.
        """
        figures: dict[str, Tensor | float | int] = {
            "loss": self.loss,
            "masked_ce": self.part_ce.sum() / max(self.num_masked, 1),
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "masked_share": self.num_masked / max(self.num_tokens, 1),
            "tokens": self.num_tokens,
        }
        if self.loss_scale is not None:
            figures |= {"loss_scale": self.loss_scale, "skipped": int(self.is_skipped)}
        return figures


def train_step(
    model: Denoiser,
    optimizer: RunOptimizer,
    rows: Rows,
    config: RunConfig,
    *,
    step: int,
    keys: Sequence[Key],
    mask_id: int,
    bos_id: int,
    at_once: MicroBatch | None = None,
) -> StepResult:
    """The update that brings `model` from step - 1 to `step`; `keys` gives one mask key per row.

    A causal model is the autoregressive twin: it learns every next token of the same rows.
    at_once: rows of a micro-batch, fewer where the memory turns out too small; None: as configured.
    """
    how = arithmetic_of(model.embedding.weight.device, config.train)
    scale = _loss_scale(optimizer, how.dtype)
    # 1. corrupt all rows of the step, and weight every masked position by the step's totals
    if config.model.causal:
        corrupted = next_token(rows)
    else:
        corrupted = corrupt(rows, config.objective, keys=keys, mask_id=mask_id, bos_id=bos_id)
    if config.objective.self_repair > 0 and not config.model.causal:
        predict = partial(predicted, model, how)
        corrupted = self_repair(
            corrupted, rows, predict, config.objective, keys=keys, mask_id=mask_id, bos_id=bos_id
        )
    weights = token_weights(
        corrupted.is_masked,
        corrupted.parts,
        corrupted.t,
        corrupted.num_eligible,
        config.objective.loss,
    )
    weights = weights * scale.value if scale else weights
    doc_ids = torch.from_numpy(rows.doc_ids)
    # 2. forward and backward, micro-batch by micro-batch; the weighted sums add up
    at_once = at_once or MicroBatch(config.train.micro_batch_rows or len(doc_ids))
    while (sums := _accumulated(model, how, corrupted, doc_ids, weights, at_once)) is None:
        optimizer.zero_grad()
        at_once.halve()
    loss, part_ce = sums
    # 3. clip and update
    if scale:
        loss /= scale.value
        _divide_gradients(model, scale.value)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
    grad_norm = grad_norm.to(loss.device)  # where nothing was masked torch's zero is on the CPU
    rate = learning_rate(step, config.optim)
    optimizer.set_learning_rate(rate)
    used = scale.value if scale else None
    is_skipped = scale is not None and _overflowed(scale, loss, grad_norm)
    if not is_skipped:
        optimizer.step()
    optimizer.zero_grad()
    num_tokens = int((rows.doc_ids >= 0).sum())
    return StepResult(loss, grad_norm, part_ce, corrupted, rate, num_tokens, used, is_skipped)


def _accumulated(
    model: Denoiser,
    how: Arithmetic,
    corrupted: Corrupted,
    doc_ids: Tensor,
    weights: Tensor,
    at_once: MicroBatch,
) -> tuple[Tensor, Tensor] | None:
    """`accumulate`'s sums; None where a GPU had not enough memory."""
    try:
        return accumulate(model, how, corrupted, doc_ids, weights, at_once.rows)
    except torch.OutOfMemoryError:
        return None  # past the handler, for the error holds on to the tensors of its frames


def _loss_scale(optimizer: RunOptimizer, dtype: torch.dtype | None) -> LossScale | None:
    """The factor that the run has come to; None where gradients need none."""
    if dtype != torch.float16:
        return None
    optimizer.loss_scale = optimizer.loss_scale or LossScale()
    return optimizer.loss_scale


def _divide_gradients(model: nn.Module, by: float) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:  # none where nothing was masked
        torch._foreach_mul_(gradients, 1.0 / by)


def _overflowed(scale: LossScale, loss: Tensor, grad_norm: Tensor) -> bool:
    """Whether to skip the step; the factor learns of it. The one wait for the device in a step,
    and in float16 alone."""
    is_finite = torch.stack((loss, grad_norm)).isfinite().tolist()
    overflowed = scale.is_too_large(*is_finite)
    scale.update(overflowed=overflowed)
    return overflowed
