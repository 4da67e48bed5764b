"""The transformer."""

from __future__ import annotations

from dataclasses import dataclass

from diffurefill.config.checks import require, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer."""

    # By default the 1.08B model of the report (1,075,980,288 parameters), as preset base-1b.

    vocab_size: int = 73_760
    """Rows of the tied embedding: pieces, then MASK and PAD, then unused rows."""
    width: int = 2048
    """D: numbers that stand for a position between blocks."""
    layers: int = 18
    """Transformer blocks."""
    heads: int = 16
    """Attention heads of a block; width / heads is the size of one."""
    ffn_width: int = 5632
    """Hidden width of a block's SwiGLU."""
    rope_base: float = 10_000.0
    """Base of the rotary position angles."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMS norms."""
    causal: bool = False
    """True makes the autoregressive twin: same parameters, causal attention."""

    def __post_init__(self) -> None:
        width, heads = self.width, self.heads
        sizes = (self.vocab_size, width, self.layers, heads, self.ffn_width)
        require(min(sizes) > 0, "model sizes must be positive")
        require(
            width % heads == 0, f"model.width {width} must be a multiple of model.heads {heads}"
        )
        require(width // heads % 2 == 0, "model.width / model.heads must be even for rotary pairs")
        require_positive("model.rope_base", self.rope_base)
        require_not_negative("model.norm_eps", self.norm_eps)
