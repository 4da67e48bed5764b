"""From the contributions of a round to the next global: gates, average, guard. No store, no clock.

Source: spec fleet.md 5.3, algorithms.md 3.5.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffurefill.config import FleetConfig
from diffurefill.fleet import gates, protocol
from diffurefill.fleet.averager import Averager, Guard
from diffurefill.fleet.collect import Arrived
from diffurefill.fleet.records import Contribution, Fold, Measured, Payload, State


@dataclass(frozen=True)
class Base:
    """What a merge starts from: files on this disk."""

    state: State
    weights: Path
    momentum: Path | None


@dataclass
class Attempt:
    """What became of a round. Without `merged`, nothing can be published yet."""

    merged: list[Arrived] = field(default_factory=list)
    """In the order of the sum; empty when everything was refused or the global was held back."""
    cosines: list[float] = field(default_factory=list)
    refused: list[tuple[Contribution, str]] = field(default_factory=list)
    """With reasons: norm, cosine, guard."""
    held: bool = False
    """The new global is worse and no single contribution explains it."""
    guard_ce: float | None = None

    @property
    def measured(self) -> list[Measured]:
        pairs = zip(self.merged, self.cosines, strict=True)
        return [Measured(norm=a.norm, cosine=cosine) for a, cosine in pairs]


class Merging:
    """Makes the next global in `folder`: `weights`, `momentum`, `update`, and the folds' files."""

    def __init__(
        self, config: FleetConfig, averager: Averager, guard: Guard | None, folder: Path, name: str
    ) -> None:
        self._config, self._averager, self._guard = config, averager, guard
        self.weights = folder / f"{name}.next"
        self.momentum = folder / f"{name}.momentum" if averager.needs_momentum else None
        self.update = folder / f"{name}.update" if config.downlink == "update" else None
        self._scores: tuple[str, list[float]] | None = None
        """Of one global, by its sha256."""

    def attempt(self, base: Base, arrived: Sequence[Arrived], folds: Sequence[Fold]) -> Attempt:
        """Refuse what is unsound, average the rest, and let the guard look at the result."""
        attempt = Attempt(merged=self._in_order(arrived))
        self._pass_gates(base, attempt)
        if not attempt.merged:
            return attempt
        self._average(base, attempt.merged, folds)
        if self._guard is not None:
            self._pass_guard(base, attempt, folds, self._guard)
        return attempt

    def published(self, sha256: str) -> None:
        """The last attempt's global is now the current one: its scores need no second look."""
        if self._scores is not None:
            self._scores = (sha256, self._scores[1])

    def _in_order(self, arrived: Sequence[Arrived]) -> list[Arrived]:
        by_identity = {a.contribution.identity: a for a in arrived}
        ordered = protocol.summation_order([a.contribution for a in arrived])
        return [by_identity[c.identity] for c in ordered]

    def _payloads(self, arrived: Sequence[Arrived], state: State) -> list[Payload]:
        discount = self._config.staleness_discount
        return [
            Payload(
                a.path, a.contribution.codec, protocol.merge_weight(a.contribution, state, discount)
            )
            for a in arrived
        ]

    def _average(self, base: Base, arrived: Sequence[Arrived], folds: Sequence[Fold]) -> None:
        self._averager.merge(
            base.weights,
            self._payloads(arrived, base.state),
            self.weights,
            momentum=base.momentum,
            momentum_dest=self.momentum,
            update_dest=self.update,
            folds=folds,
        )

    def _pass_gates(self, base: Base, attempt: Attempt) -> None:
        stand_out = gates.norms_stand_out(
            [a.norm for a in attempt.merged], [a.contribution.moment_steps for a in attempt.merged]
        )
        _refuse(attempt, stand_out, "norm")
        while True:
            payloads = self._payloads(attempt.merged, base.state)
            attempt.cosines = self._averager.cosines(payloads)
            stand_out = gates.cosines_stand_out(attempt.cosines, self._config.min_cosine)
            if not any(stand_out):
                return
            _refuse(attempt, stand_out, "cosine")

    # --- the guard -------------------------------------------------------------------------------

    def _pass_guard(
        self, base: Base, attempt: Attempt, folds: Sequence[Fold], guard: Guard
    ) -> None:
        """Keep the average if held-out text did not get worse; else look for one culprit."""
        before = self._base_scores(base, guard)
        after = guard.scores(self.weights)
        if gates.is_worse(before, after):
            culprit = self._culprit(base, attempt, before, guard)
            if culprit is None:
                attempt.merged, attempt.cosines, attempt.held = [], [], True
                return
            _refuse(attempt, [a is culprit for a in attempt.merged], "guard")
            if not attempt.merged:
                attempt.cosines = []
                return
            attempt.cosines = self._averager.cosines(self._payloads(attempt.merged, base.state))
            self._average(base, attempt.merged, folds)
            after = guard.scores(self.weights)
        attempt.guard_ce = statistics.fmean(after)
        self._scores = ("", after)

    def _base_scores(self, base: Base, guard: Guard) -> list[float]:
        sha256 = base.state.global_weights.sha256
        if self._scores is None or self._scores[0] != sha256:
            self._scores = (sha256, guard.scores(base.weights))
        return self._scores[1]

    def _culprit(
        self, base: Base, attempt: Attempt, before: list[float], guard: Guard
    ) -> Arrived | None:
        """The one without which the average is not worse, and best; a lone one is to blame."""
        if len(attempt.merged) == 1:
            return attempt.merged[0]
        found: list[tuple[float, int]] = []
        for index in range(len(attempt.merged)):
            rest = [a for i, a in enumerate(attempt.merged) if i != index]
            self._average(base, rest, ())
            scores = guard.scores(self.weights)
            if not gates.is_worse(before, scores):
                found.append((statistics.fmean(scores), index))
        return attempt.merged[min(found)[1]] if found else None


def _refuse(attempt: Attempt, stand_out: Sequence[bool], reason: str) -> None:
    for arrived, odd in zip(list(attempt.merged), stand_out, strict=True):
        if odd:
            attempt.merged.remove(arrived)
            attempt.refused.append((arrived.contribution, reason))
