"""The factor that keeps float16 gradients off zero.

float16 holds nothing below 6e-8, where many gradients lie. The loss is multiplied by a power of
two before backward and the gradients divided by it after: exact but for what would have been lost.
Where the factor was too large a gradient overflows; that step is skipped and the factor halved
(mixed precision training, arXiv:1710.03740).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

GROWTH_STEPS = 2000
"""Steps without an overflow after which twice the factor is tried."""
LARGEST = 2.0**24


@dataclass
class LossScale:
    """Plain numbers: with them in the optimiser's state a resumed run goes on exactly."""

    value: float = 2.0**16
    good_steps: int = 0
    """Taken since the factor last changed."""

    def is_too_large(self, is_loss_finite: bool, are_gradients_finite: bool) -> bool:
        """Whether the factor is at fault. A loss that is no number is nobody's overflow, and at
        factor 1 the gradient itself is none."""
        return is_loss_finite and not are_gradients_finite and self.value > 1.0

    def update(self, *, overflowed: bool) -> None:
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        return asdict(self)
