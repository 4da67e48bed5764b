"""Weights that say where they come from, and a learner and an averager for them.

A global is {element: coefficient} in exact fractions. Every interval of every launch adds one
element of its own, so a contribution lost, doubled or merged into other weights than its own base
shows exactly. A payload also says which rows it was trained on and which base it really started
from, whatever its manifest claims.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from diffurefill.fleet.records import Fold, Inspection, Payload, State

CODEC = "fp32-delta"
"""Its name in manifests; the bytes are JSON."""
Weights = dict[str, Fraction]

POISON = "poison"
"""Elements that begin so raise the held-out CE: what a worker on wrong text contributes."""

HUGE = Fraction(1_000_000)


def dump_weights(weights: Mapping[str, Fraction]) -> bytes:
    return json.dumps({k: str(v) for k, v in sorted(weights.items())}).encode()


@functools.lru_cache(maxsize=4096)
def _parsed(content: bytes) -> Mapping[str, Fraction]:
    return {k: Fraction(v) for k, v in json.loads(content).items()}


def load_weights(content: bytes) -> Weights:
    return dict(_parsed(content))


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A payload. `delta` comes first in its JSON: `Costs.bytes_of` knows payloads by it."""

    delta: Weights
    slot: int
    base: str
    """sha256 of the weights it was really trained from."""
    rows: tuple[int, int]
    """The slot's rows it was really trained on: from, and up to but without."""
    finite: bool = True

    @property
    def norm(self) -> float:
        return math.sqrt(sum(float(v) ** 2 for v in self.delta.values()))

    @property
    def poisons(self) -> bool:
        return any(element.startswith(POISON) for element in self.delta)

    def dump(self) -> bytes:
        delta = {k: str(v) for k, v in self.delta.items()}
        rest = {"slot": self.slot, "base": self.base, "rows": self.rows, "finite": self.finite}
        return json.dumps({"delta": delta, **rest}).encode()


@functools.lru_cache(maxsize=4096)
def load_delta(content: bytes) -> Delta:
    record = json.loads(content)
    return Delta(
        delta={k: Fraction(v) for k, v in record["delta"].items()},
        slot=record["slot"],
        base=record["base"],
        rows=(record["rows"][0], record["rows"][1]),
        finite=record["finite"],
    )


def weighted_mean(parts: Sequence[tuple[Mapping[str, Fraction], Fraction]]) -> Weights:
    total, mean = sum(weight for _, weight in parts), dict[str, Fraction]()
    for values, weight in parts:
        for element, value in values.items():
            mean[element] = mean.get(element, Fraction(0)) + value * weight / total
    return mean


def plus(a: Mapping[str, Fraction], b: Mapping[str, Fraction]) -> Weights:
    return {k: a.get(k, Fraction(0)) + b.get(k, Fraction(0)) for k in {**a, **b}}


def mixed(previous: Mapping[str, Fraction], keep: float, new: Mapping[str, Fraction]) -> Weights:
    """keep * previous + (1 - keep) * new, exactly."""
    k = Fraction(keep).limit_denominator(10_000)
    return {
        element: k * previous.get(element, Fraction(0)) + (1 - k) * new.get(element, Fraction(0))
        for element in {**previous, **new}
    }


def held_out_ce(weights: Mapping[str, Fraction]) -> float:
    """Falls with everything learned, jumps with poison and with huge steps. Nats, so to speak."""
    bad = sum(v for k, v in weights.items() if k.startswith(POISON) or v > 1)
    return 10.0 - 0.01 * float(sum(weights.values()) - bad) + 5.0 * min(float(bad), 10.0)


class ExactAverager:
    """The merger's arithmetic on provenance weights: replacement, outer lr 1."""

    codecs: Collection[str] = (CODEC,)
    needs_momentum = False
    outer_gain = None

    def inspect(self, payload: Path, codec: str, base: Path) -> Inspection:
        content = payload.read_bytes()
        try:
            delta = load_delta(content)
        except (ValueError, KeyError, TypeError):
            return _inspected_weights(content)
        if not delta.finite:
            return Inspection("nonfinite", math.inf)
        return Inspection(None, delta.norm)

    def cosines(self, payloads: Sequence[Payload]) -> list[float]:
        return [1.0 if len(payloads) == 1 else 0.0 for _ in payloads]

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
        parts = [(load_delta(p.path.read_bytes()).delta, Fraction(p.weight)) for p in payloads]
        step = weighted_mean(parts)
        if update_dest is not None:
            update_dest.write_bytes(dump_weights(step))
        dest.write_bytes(dump_weights(plus(_parsed(base.read_bytes()), step)))
        self.fold(dest, folds)

    def fold(self, new: Path, folds: Sequence[Fold]) -> None:
        weights = load_weights(new.read_bytes())
        for fold in folds:
            side = weights
            if fold.previous is not None:
                side = mixed(_parsed(fold.previous.read_bytes()), fold.keep, weights)
            fold.dest.write_bytes(dump_weights(side))

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        apply_update(base, update, dest)


def _inspected_weights(content: bytes) -> Inspection:
    """A file of weights is one of its own differences from zero: an audit asks about those too."""
    try:
        weights = _parsed(content)
    except (ValueError, AttributeError, TypeError):
        return Inspection("schema", math.inf)
    return Inspection(None, math.sqrt(sum(float(v) ** 2 for v in weights.values())))


def apply_update(base: Path, update: Path, dest: Path) -> None:
    step = _parsed(update.read_bytes())
    dest.write_bytes(dump_weights(plus(_parsed(base.read_bytes()), step)))


@dataclass
class ExactLearner:
    """One step reads one row of the slot. `name` is its launch's own: elements never repeat."""

    number: int
    name: str
    spend: Callable[[float], None] = lambda seconds: None
    """Charges virtual time to the process that trains."""
    step_seconds: float = 0.0
    vice: str = ""
    """`nan` (says so), `sneaky_nan` (does not), `huge`, `poison`: what is wrong with it."""
    keeps_drift: bool = False
    on_adopt: Callable[[str, int, str, int, Any, int], None] = lambda *facts: None
    """Told (name, generation, sha256 of the bytes, step, cursor, slot) at every adoption."""
    codec: str = CODEC
    machine: str = "abacus"
    adopted: tuple[int, str] = (-1, "")
    """Generation and sha256 of the weights it trains from."""
    num_intervals: int = 0
    rows: list[int] = field(default_factory=list)
    at: int = 0

    def adopt(self, weights: Path, state: State, ahead: int) -> dict[str, Any]:
        sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
        cursor = state.cursor(self.number)
        self.on_adopt(self.name, state.gen, sha256, state.step, cursor, self.number)
        if not (ahead and self.keeps_drift):
            self.at = cursor["rows"] if cursor else 0
            self.rows = []
        self.adopted = (state.gen, sha256)
        return {"held_out_ce": held_out_ce(load_weights(weights.read_bytes()))}

    def step(self, local_step: int) -> dict[str, Any]:
        self.spend(self.step_seconds)
        self.rows.append(self.at)
        self.at += 1
        return {"tokens": 10, "loss": 1.0}

    def reset(self) -> None:
        self.vice = ""

    def cursor(self) -> dict[str, int]:
        return {"rows": self.at}

    def save_delta(self, base: Path, dest: Path) -> float:
        self.num_intervals += 1
        element = f"{self.name}.{self.num_intervals}"
        if self.vice == "poison":
            element = f"{POISON}:{element}"
        delta = Delta(
            delta={element: HUGE if self.vice == "huge" else Fraction(1)},
            slot=self.number,
            base=self.adopted[1],
            rows=(self.rows[0], self.rows[-1] + 1) if self.rows else (self.at, self.at),
            finite=self.vice not in ("nan", "sneaky_nan"),
        )
        dest.write_bytes(delta.dump())
        self.rows = []
        return math.nan if self.vice == "nan" else delta.norm

    def finish(self) -> dict[str, Any]:
        return {"drift": 0.25}

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        apply_update(base, update, dest)


class ExactGuard:
    """Held-out rows that all feel the same."""

    def scores(self, weights: Path) -> list[float]:
        ce = held_out_ce(load_weights(weights.read_bytes()))
        return [ce, ce + 0.01, ce - 0.01]
