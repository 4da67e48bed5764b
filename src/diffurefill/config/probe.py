"""What is asked of every model of a run."""

from __future__ import annotations

from dataclasses import dataclass

from diffurefill.config.checks import require


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Fixed held-out rows with stored masks, made once by `init`."""

    num_rows: int = 64
    mask_rates: tuple[float, ...] = (0.3, 0.6, 0.9)
    decoding_mask_rate: float = 0.5
    decoding_passes: int = 8

    def __post_init__(self) -> None:
        require(self.num_rows >= 1, "probe.num_rows must be at least 1")
        rates = (*self.mask_rates, self.decoding_mask_rate)
        require(all(0 < rate < 1 for rate in rates), "probe mask rates must lie in (0, 1)")
