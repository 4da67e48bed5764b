"""What every section checks its values with."""

from __future__ import annotations

import math

from diffurefill.toml import UserError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def require_positive(name: str, *values: float) -> None:
    """NaN is not above 0, and most of what may be infinite would do nothing or wait for ever."""
    require(all(0 < v < math.inf for v in values), f"{name} must be above 0 and finite")


def require_not_negative(name: str, *values: float) -> None:
    require(all(0 <= v < math.inf for v in values), f"{name} must be at least 0 and finite")
