"""What decoding hands back: every pass as it ended, and the result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diffurefill.decode.canvas import Canvas


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass as it ended; tensors (B, T). `canvas` is the one decoding began with."""

    canvas: Canvas
    stage: int
    index: int
    """k within the stage (and the block), from 0."""
    num_passes: int
    """The stage's; 0 where it takes as many as needed."""
    ids: Tensor
    confidence: Tensor
    accepted: Tensor
    remasked: Tensor
    """What a refill pass took back before filling it again; nowhere True in a draft."""
    previous_ids: Tensor
    """Ids before the pass, and before its re-masking."""
    block: int = 0
    """Which block of a text written block by block."""
    ended: Tensor | None = None
    """Holds EOS because the text was over, and nobody drew it; None where no text ends early."""

    @property
    def is_masked(self) -> Tensor:
        """Positions still to be filled. A fillable position holds MASK until it is written."""
        return self.canvas.fillable & (self.ids == self.canvas.ids)


@dataclass(frozen=True, eq=False)
class Generation:
    """ids (B, T) int64; confidence (B, T) float32: log p1 of each written token, 0 elsewhere."""

    ids: Tensor
    confidence: Tensor
    num_forward_passes: int
    """Calls of the denoiser."""
    trajectory: list[Pass]
    """Every pass, or nothing where it was not to be kept."""
    row_passes: Tensor
    """(B,) int64: passes that wrote in each row."""
    num_positions: int = 0
    """Positions the denoiser computed, summed over its calls: what the calls cost. Fewer than calls
    times B times T where finished rows left or keys and values were kept, as a causal model's
    always are; more where confidences were judged anew."""
