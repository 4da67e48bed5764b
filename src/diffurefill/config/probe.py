"""What is asked of every model of a run."""

from __future__ import annotations

from dataclasses import dataclass

from diffurefill.config.checks import require

HELD_OUT, SHORT = "held_out", "short"
"""The sets that every run has; `short` only where rows are longer than that."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Fixed held-out rows with stored masks, made once by `init`."""

    num_rows: int = 64
    """Rows of each set, where it has text for so many."""
    mask_rates: tuple[float, ...] = (0.3, 0.6, 0.9)
    """Cross entropy is taken with these shares of a row masked."""
    decoding_mask_rate: float = 0.5
    """Share of a row that is masked when decoding accuracy is asked."""
    decoding_passes: int = 8
    """Passes in which those positions are then filled."""
    sets: tuple[str, ...] = ()
    """Names of data.probe_sources that are probed each on its own (wiki, code), not as held-out
    text. The held-out probe reads the other probe sources, or the held-out documents."""
    short_length: int = 128
    """Tokens in a row of the short-context probe: the starts of held-out documents. There is none
    where data.row_length is no longer than this."""

    def __post_init__(self) -> None:
        require(self.num_rows >= 1, "probe.num_rows must be at least 1")
        rates = (*self.mask_rates, self.decoding_mask_rate)
        require(all(0 < rate < 1 for rate in rates), "probe mask rates must lie in (0, 1)")
        require(self.decoding_passes >= 1, "probe.decoding_passes must be at least 1")
        require(self.short_length >= 2, "probe.short_length must be at least 2")
        taken = [name for name in self.sets if name in (HELD_OUT, SHORT) or "/" in name]
        require(not taken, f"probe.sets: {', '.join(taken)} cannot be the name of a probe set")
        require(len(set(self.sets)) == len(self.sets), "probe.sets names one source twice")
