"""Weights that only say how large they are, and what transferring and computing them takes.

A file here is `<bytes> <kind> <name>`: it stands for a real one of so many bytes. Names follow from
what a file was made of, so every merge makes another file and the same work the same one. Beside
the hub's costs a process pays for its own passes over bytes: hashing, decoding, averaging, loading.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffurefill.fleet.records import Fold, Inspection, Payload, State
from diffurefill.fleet.simulate.connection import SimStore
from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.kernel import Costs, Process
from diffurefill.store.base import Ref

GLOBAL, DELTA, UPDATE = "global", "delta", "update"

BYTES_PER_PARAMETER = {
    "fp32-delta": 4.0,
    "bf16-delta": 2.0,
    "int8-delta": 1.0 + 4.0 / 2048,
    "int4-delta": 0.5 + 2.0 / 32,
}
"""Of a contribution, scales included: int8 has an fp32 one for each row of 2048 (fleet/formats.py),
int4 a bf16 one for each 32 elements."""
UPDATE_BYTES_PER_PARAMETER = BYTES_PER_PARAMETER["int8-delta"]
"""Of a downlink update."""

CALLS: dict[str, tuple[int, int]] = {
    "lanes": (1, 0), "poll": (1, 0), "head": (1, 1), "lookup": (1, 0), "read": (0, 1),
    "fetch": (0, 1), "stage": (3, 0), "publish": (2, 0), "compact": (4, 1), "selftest": (20, 5),
}  # fmt: skip
"""Operation -> (API calls, resolver calls) that a model repository is asked for; counted by hand
in store/hub.py, retries apart."""


def write(path: Path, size: float, kind: str, *parts: str) -> None:
    name = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    path.write_text(f"{size:.0f} {kind} {name}")


def size_of(content: bytes) -> float:
    return float(content.split(b" ", 1)[0])


@dataclass(frozen=True, kw_only=True)
class SizedCosts(Costs):
    """Costs of one process; its bandwidth is its own."""

    local_bytes_per_second: float = 4e9
    """Reading, decoding, averaging, writing: each byte of each file touched. 4.3e9 were measured
    (results/merge.json: five files in, one out)."""
    hash_bytes_per_second: float = 1.7e9
    """sha256 of a file that is to be staged, or was made here."""

    def bytes_of(self, content: bytes) -> float:
        return size_of(content)

    def pass_seconds(self, *paths: Path) -> float:
        return sum(size_of(p.read_bytes()) for p in paths) / self.local_bytes_per_second

    def hash_seconds(self, path: Path) -> float:
        return size_of(path.read_bytes()) / self.hash_bytes_per_second


@dataclass
class Traffic:
    """What the hub was asked for, from `since` on."""

    since: float = 0.0
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    api_calls: Counter[int] = field(default_factory=Counter)
    """By five-minute window, as the hub counts them."""
    resolver_calls: Counter[int] = field(default_factory=Counter)

    def call(self, op: str, now: float) -> None:
        if now >= self.since:
            api, resolver = CALLS.get(op, (1, 0))
            self.api_calls[int(now // 300.0)] += api
            self.resolver_calls[int(now // 300.0)] += resolver


class MeteredStore(SimStore):
    """A process's connection, counted. A file the hub has already is not sent again."""

    def __init__(
        self, hub: SimHub, process: Process, plan: Any, costs: SizedCosts, traffic: Traffic
    ) -> None:
        super().__init__(hub, process, plan, costs)
        self.sized, self.traffic = costs, traffic

    def _operate(self, op: str, lane: str, effect: Callable[[str | None], Any]) -> Any:
        self.traffic.call(op, self.process.kernel.now)
        return super()._operate(op, lane, effect)

    def stage(self, source: Path) -> Ref:
        content = source.read_bytes()
        self.process.spend(self.sized.hash_seconds(source))
        if hashlib.sha256(content).hexdigest() in self.hub.blobs:
            return self._operate("stage", "", lambda fault: self.hub.stage(source))
        if self.process.kernel.now >= self.traffic.since:
            self.traffic.up_bytes += size_of(content)
        return super().stage(source)

    def fetch(self, ref: Ref, dest: Path) -> Path:
        path = super().fetch(ref, dest)
        if self.process.kernel.now >= self.traffic.since:
            self.traffic.down_bytes += size_of(path.read_bytes())
        return path


@dataclass
class SizedAverager:
    """The merger's arithmetic: no numbers, only the time that passes over the files take."""

    codec: str
    spend: Callable[[float], None]
    costs: SizedCosts
    update_bytes: float
    checks: bool = True
    """Whether contributions are read to be judged before they are read to be averaged."""
    needs_momentum = False
    outer_gain = None

    @property
    def codecs(self) -> Collection[str]:
        return (self.codec,)

    def inspect(self, payload: Path, codec: str, base: Path) -> Inspection:
        if self.checks:
            self.spend(self.costs.pass_seconds(payload))
        return Inspection(None, 1.0)

    def cosines(self, payloads: Sequence[Payload]) -> list[float]:
        if self.checks:
            self.spend(self.costs.pass_seconds(*(p.path for p in payloads)))
        return [1.0 for _ in payloads]

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
        parts = [base.read_text(), *(p.path.read_text() for p in payloads)]
        size = size_of(base.read_bytes())
        written = [dest]
        if update_dest is not None:
            write(update_dest, self.update_bytes, UPDATE, *parts)
            parts, written = [base.read_text(), update_dest.read_text()], [dest, update_dest]
        write(dest, size, GLOBAL, *parts)
        self.spend(self.costs.pass_seconds(base, *(p.path for p in payloads), *written))
        self._fold(dest, folds)

    def fold(self, new: Path, folds: Sequence[Fold]) -> None:
        self.spend(self.costs.pass_seconds(new))
        self._fold(new, folds)

    def _fold(self, new: Path, folds: Sequence[Fold]) -> None:
        for fold in folds:
            read = [fold.previous] if fold.previous else []
            parts = [new.read_text(), f"{fold.keep:.6f}", *(p.read_text() for p in read)]
            write(fold.dest, size_of(new.read_bytes()), GLOBAL, *parts)
            self.spend(self.costs.pass_seconds(*read, fold.dest))

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        write(dest, size_of(base.read_bytes()), GLOBAL, base.read_text(), update.read_text())
        self.spend(self.costs.pass_seconds(base, update, dest) + self.costs.hash_seconds(dest))


@dataclass
class SizedGuard:
    """Held-out rows that never object; `seconds` for each scoring."""

    spend: Callable[[float], None]
    seconds: float

    def scores(self, weights: Path) -> list[float]:
        self.spend(self.seconds)
        return [1.0, 1.0]


@dataclass
class SizedLearner:
    """Trains by letting time pass; tells `on_step` (start, seconds, tokens) of every step."""

    name: str
    codec: str
    payload_bytes: float
    step_seconds: float
    tokens_per_step: int
    costs: SizedCosts
    process: Process
    on_step: Callable[[float, float, int], None]
    machine: str = "simulated"
    rows: int = 0
    num_pushed: int = 0

    def adopt(self, weights: Path, state: State, ahead: int) -> dict[str, Any]:
        cursor = state.cursor(int(self.name.partition("#")[0][1:]))
        self.rows = cursor["rows"] if cursor else 0
        self.process.spend(self.costs.pass_seconds(weights))
        return {}

    def step(self, local_step: int) -> dict[str, Any]:
        start = self.process.kernel.now + self.process.spent
        self.process.spend(self.step_seconds)
        self.on_step(start, self.step_seconds, self.tokens_per_step)
        self.rows += 1
        return {"tokens": self.tokens_per_step, "loss": 1.0}

    def reset(self) -> None:
        pass

    def cursor(self) -> dict[str, int]:
        return {"rows": self.rows}

    def save_delta(self, base: Path, dest: Path) -> float:
        self.num_pushed += 1
        write(dest, self.payload_bytes, DELTA, self.name, str(self.num_pushed))
        self.process.spend(self.costs.pass_seconds(base, dest))
        return 1.0

    def finish(self) -> dict[str, Any]:
        return {}

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        write(dest, size_of(base.read_bytes()), GLOBAL, base.read_text(), update.read_text())
        self.process.spend(
            self.costs.pass_seconds(base, update, dest) + self.costs.hash_seconds(dest)
        )
