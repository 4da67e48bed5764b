"""What is masked, how the weights move, and how much is done at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffurefill.config.checks import require, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is masked and how the loss is weighted."""

    t_min: float = 0.15
    """t ~ U(t_min, 1) per row. 0.15 is the card's value; 0 is the report's U(0, 1)."""
    prefix_rows: float = 0.5
    """Share of rows that keep a clean prefix of random length: the shape of prompted text."""
    loss: Literal["pooled", "row", "elbo"] = "pooled"
    """Of the masked tokens' cross entropies: `pooled` their mean, `row` the mean of the rows'
    means, `elbo` each weighted by its row's 1 / t."""
    self_repair: float = 0.0
    """Share of rows that learn to mend the model's own draft: filled by its samples, of which the
    least sure fifth is masked again. The card's pilot found it harmful or neutral."""
    self_repair_rate: tuple[float, float] = (0.10, 0.35)
    """Lowest and highest share of a row that such a draft fills."""

    def __post_init__(self) -> None:
        require(0.0 <= self.t_min < 1.0, "objective.t_min must lie in [0, 1)")
        require(0.0 <= self.prefix_rows <= 1.0, "objective.prefix_rows must lie in [0, 1]")
        require(0.0 <= self.self_repair <= 1.0, "objective.self_repair must lie in [0, 1]")
        low, high = self.self_repair_rate
        require(
            0.0 < low <= high <= 1.0,
            "objective.self_repair_rate must be two rising shares in (0, 1]",
        )
        require(
            self.self_repair == 0.0 or self.loss != "elbo",
            "objective.self_repair masks what the model is unsure of, which no elbo can weigh: set "
            "objective.loss to pooled or row",
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser and schedule; the learning rate is a pure function of the global step."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the block matrices, AdamW for the embedding and the gains."""
    peak_lr: tuple[tuple[int, float], ...] = ((0, 3e-4),)
    """(from_step, rate) pairs: the peak in force from that step on."""
    muon_lr_ratio: float = 1.0
    """Muon's rate over the schedule's rate."""
    muon_scale: Literal["rms", "original"] = "rms"
    """`rms`: a matrix moves as far as under AdamW. `original`: by sqrt(max(1, rows / cols)) times
    the rate, which then wants a `muon_lr_ratio` of its own."""
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the orthogonalisation; `auto`: bfloat16 where the hardware has it."""
    cautious: bool = False
    """No weight moves against its gradient of the step; what still moves makes up for it."""
    warmup_steps: int = 500
    """Steps in which the rate rises from zero to its peak."""
    total_steps: int = 200_000
    """Steps of the whole schedule."""
    floor: float = 0.1
    """The cosine ends at this share of the peak at total_steps."""
    tail_from_step: int | None = None
    """From here the rate falls linearly to zero at total_steps; None leaves the cosine alone."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled, of matrices alone."""
    clip_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it; inf: none is."""

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.peak_lr]
        require(steps[:1] == [0], "optim.peak_lr must start with a pair [0, rate]")
        require(steps == sorted(set(steps)), "optim.peak_lr pairs must rise in their steps")
        require_not_negative("every rate of optim.peak_lr", *(rate for _, rate in self.peak_lr))
        warmup, total = self.warmup_steps, self.total_steps
        require(0 <= warmup < total, "optim.warmup_steps must be below optim.total_steps")
        tail = warmup if self.tail_from_step is None else self.tail_from_step
        require(warmup <= tail < total, "optim.tail_from_step must lie in [warmup, total) steps")
        require(0.0 <= self.floor <= 1.0, "optim.floor must lie in [0, 1]")
        require_positive("optim.muon_lr_ratio", self.muon_lr_ratio)
        require(all(0.0 <= beta < 1.0 for beta in self.betas), "optim.betas must lie in [0, 1)")
        require_positive("optim.eps", self.eps)
        require_not_negative("optim.weight_decay", self.weight_decay)
        require(self.clip_norm > 0.0, "optim.clip_norm must be above 0; inf clips nothing")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    batch_rows: int = 64
    """B: rows of one optimiser step."""
    micro_batch_rows: int = 0
    """Rows of one forward pass; 0: as many as fit into the memory. Changes the result by rounding
    alone."""
    activation_budget: float = 1.0
    """Share of the blocks whose activations are kept for the backward pass; those of the others are
    computed again, which costs up to a third of the speed. Never changes the result."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic over fp32 weights and gradients. auto: bf16 where a GPU or CPU has it, fp16 with
    loss scaling on a GPU that does not, fp32 on other CPUs."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Blocks as compiled graphs. auto: on a GPU of sm_80 or later; on: on a CPU too. A machine that
    cannot compile trains without, and says so."""
    log_every_steps: int = 10
    """Steps from one line of the log to the next."""

    def __post_init__(self) -> None:
        require(self.batch_rows >= 1, "train.batch_rows must be at least 1")
        rows = self.micro_batch_rows
        require(rows >= 0, "train.micro_batch_rows must be at least 1, or 0 to take what fits")
        budget = self.activation_budget
        require(0.0 < budget <= 1.0, "train.activation_budget must lie in (0, 1]; 1 keeps all")
        require(self.log_every_steps >= 1, "train.log_every_steps must be at least 1")
