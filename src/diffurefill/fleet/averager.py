"""What a merger needs done to weights, as interfaces: the loop itself imports no torch.

The real ones are averaging.py and guard.py; the simulator puts provenance vectors in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from diffurefill.fleet.records import Fold, Inspection, Payload


class Averager(Protocol):
    """The arithmetic of a merge. Deterministic: any machine makes the same bytes."""

    @property
    def codecs(self) -> Collection[str]:
        """Codecs that it can decode."""
        ...

    @property
    def needs_momentum(self) -> bool:
        """Whether the outer step has a momentum, read and written by `merge`."""
        ...

    @property
    def outer_gain(self) -> float | None:
        """Length of the last merge's step over that of the mean delta, for the log; None where the
        outer step's rate says it already."""
        ...

    def inspect(self, payload: Path, codec: str, base: Path) -> Inspection: ...

    def cosines(self, payloads: Sequence[Payload]) -> list[float]:
        """Cosine of each delta with the sum of the others; 1.0 for a lone one."""
        ...

    def merge(
        self,
        base: Path,
        payloads: Sequence[Payload],
        dest: Path,
        *,
        momentum: Path | None = None,
        momentum_dest: Path | None = None,
        update_dest: Path | None = None,
        folds: Sequence[Fold] = (),
    ) -> None:
        """`dest` = the outer step from `base` along the weighted mean of the decoded payloads.

        With `update_dest` the step is quantised and written there first, and `dest` is exactly
        what `apply_update` makes of it. `folds` move side averages on in the same pass.
        """
        ...

    def fold(self, new: Path, folds: Sequence[Fold]) -> None:
        """The same arithmetic for side averages, later."""
        ...

    def apply_update(self, base: Path, update: Path, dest: Path) -> None: ...


class Guard(Protocol):
    """Scores a global before it is published."""

    def scores(self, weights: Path) -> list[float]:
        """CE of each of the same held-out rows, nats per masked token."""
        ...
