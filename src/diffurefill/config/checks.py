"""What every section checks its values with."""

from __future__ import annotations

from diffurefill.toml import UserError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
