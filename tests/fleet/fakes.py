"""A fleet without torch: weights are provenance vectors, the store is a dict, time is virtual.

A global's weights are {element: coefficient}. Every contribution adds one element of its own, so a
contribution that is lost, counted twice or merged into the wrong model shows exactly in the sums.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from diffurefill import config as configs
from diffurefill.config import FleetConfig, RunConfig
from diffurefill.fleet import records
from diffurefill.fleet.merger import Merger
from diffurefill.fleet.records import Contribution, Fold, Inspection, Payload, State
from diffurefill.fleet.run import Run, read_state
from diffurefill.fleet.worker import Worker
from diffurefill.store.base import (
    MAIN,
    Change,
    Corrupt,
    Store,
    Version,
    dump_json,
    read_json,
    sha256_file,
)
from tests.store.memory import MemoryStore as MemoryStore

CODEC: Final = "fp32-delta"
"""A name that a configuration may hold; the payloads are {element: value} as JSON."""
FLEET = FleetConfig(
    local_steps=4,
    min_fresh=2,
    grace_seconds=30.0,
    live_seconds=200.0,
    lease_seconds=30.0,
    poll_seconds=1.0,
    training_poll_seconds=1.0,
    log_seconds=20.0,
    codec=CODEC,
)


Weights = dict[str, Fraction]


def write_weights(path: Path, weights: Weights) -> None:
    path.write_text(json.dumps({k: str(v) for k, v in sorted(weights.items())}))


def read_weights(path: Path) -> Weights:
    return {k: Fraction(v) for k, v in json.loads(path.read_text()).items()}


@dataclass(frozen=True)
class FakeAverager:
    codecs = (CODEC,)
    outer_gain = None
    outer_momentum: Fraction = Fraction(0)
    """Above zero: Nesterov's outer step."""

    @property
    def needs_momentum(self) -> bool:
        return self.outer_momentum > 0

    def inspect(self, payload: Path, codec: str, base: Path) -> Inspection:
        values = json.loads(payload.read_text())
        if "nan" in values.values():
            return Inspection("nonfinite", float("inf"))
        norm = sum(float(Fraction(v)) ** 2 for v in values.values()) ** 0.5
        return Inspection(None, norm)

    def cosines(self, payloads: Sequence[Payload]) -> list[float]:
        """What the fake learners wrote in is what they point at."""
        if len(payloads) < 2:
            return [1.0] * len(payloads)
        return [-1.0 if "against" in read_weights(p.path) else 0.3 for p in payloads]

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
        step: Weights = {}
        total = sum(Fraction(p.weight) for p in payloads)
        for p in payloads:
            for element, value in read_weights(p.path).items():
                step[element] = step.get(element, Fraction(0)) + Fraction(p.weight) / total * value
        if momentum_dest is not None:
            earlier = read_weights(momentum) if momentum else {}
            moved = _plus(_times(earlier, self.outer_momentum), step)
            write_weights(momentum_dest, moved)
            step = _plus(step, _times(moved, self.outer_momentum))
        weights = _plus(read_weights(base), step)
        if update_dest is not None:
            write_weights(update_dest, step)
        write_weights(dest, weights)
        self.fold(dest, folds)

    def fold(self, new: Path, folds: Sequence[Fold]) -> None:
        for fold in folds:
            now = read_weights(new)
            if fold.previous is not None:
                k, old = Fraction(fold.keep).limit_denominator(1000), read_weights(fold.previous)
                keys = old.keys() | now.keys()
                now = {key: k * old.get(key, 0) + (1 - k) * now.get(key, 0) for key in keys}
            write_weights(fold.dest, now)

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        write_weights(dest, _plus(read_weights(base), read_weights(update)))


def _times(a: Weights, factor: Fraction) -> Weights:
    return {k: factor * v for k, v in a.items()}


def _plus(a: Weights, b: Weights) -> Weights:
    return {k: a.get(k, Fraction(0)) + b.get(k, Fraction(0)) for k in {**a, **b}}


@dataclass
class FakeGuard:
    """CE falls with every element and rises with `poison`."""

    num_asked: int = 0

    def scores(self, weights: Path) -> list[float]:
        self.num_asked += 1
        found = read_weights(weights)
        good = sum(v for k, v in found.items() if k != "poison")
        ce = 7.0 - 0.01 * float(good) + float(found.get("poison", 0))
        return [ce, ce + 0.02, ce - 0.01]


@dataclass
class FakeLearner:
    """One step reads one row: cursors count rows, so a skipped or repeated row shows."""

    number: int
    nan_intervals: int = 0
    codec: str = CODEC
    machine: str = "abacus"
    rows_at: int = 0
    gen: int = -1
    adopted: list[tuple[int, str]] = field(default_factory=list)
    num_resets: int = 0

    extra: Mapping[str, int] = field(default_factory=dict)
    """Elements that every contribution of this one holds besides its own: `poison`, `against`."""
    aheads: list[int] = field(default_factory=list)

    def adopt(self, weights: Path, state: State, ahead: int) -> dict[str, Any]:
        cursor = state.cursor(self.number)
        self.aheads.append(ahead)
        if not ahead:
            self.rows_at = cursor["rows"] if cursor else 0
        self.gen = state.gen
        self.adopted.append((state.gen, sha256_file(weights).sha256))
        adoption = {"adoption": -0.5} if state.gen else {}
        return {"held_out_ce": 7.0 - state.gen, **adoption}

    def step(self, local_step: int) -> dict[str, Any]:
        self.rows_at += 1
        return {"tokens": 10, "loss": 1.0}

    def reset(self) -> None:
        self.num_resets += 1

    def cursor(self) -> dict[str, int]:
        return {"rows": self.rows_at}

    def save_delta(self, base: Path, dest: Path) -> float:
        if self.nan_intervals:
            self.nan_intervals -= 1
            return float("nan")
        own = {f"w{self.number}:{self.rows_at}": Fraction(1)}
        write_weights(dest, {**own, **{k: Fraction(v) for k, v in self.extra.items()}})
        return 1.0

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        FakeAverager().apply_update(base, update, dest)

    def finish(self) -> dict[str, Any]:
        return {"drift": 0.25}


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def new_run(store: Store, cache: Path, fleet: FleetConfig = FLEET) -> Run:
    """Generation 0 of a fake run, opened."""
    config = replace(RunConfig(), fleet=fleet)
    cache.mkdir(parents=True, exist_ok=True)
    weights = cache / "initial"
    write_weights(weights, {})
    state = State(
        run_id="fake",
        config_sha=configs.digest(config),
        schema_sha="schema",
        corpus_sha="corpus",
        global_weights=store.stage(weights),
    )
    files: dict[str, Change] = {
        records.STATE: dump_json(records.to_json(state)),
        records.CONFIG: configs.dumps(config).encode(),
        records.TOKENIZER: b"{}",
        records.GLOBAL: state.global_weights,
    }
    store.publish(MAIN, files, expect=None)
    return reopened(store, config, cache)


def reopened(store: Store, config: RunConfig, cache: Path) -> Run:
    return Run(store, config, cache, "{}")


class FrozenHead:
    """A hub that goes on answering with an old head of the main lane, from `freeze` on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._frozen: Version | None = None
        self.uri = store.uri

    def freeze(self) -> None:
        self._frozen = self._store.head(MAIN)

    def thaw(self) -> None:
        self._frozen = None

    def head(self, lane: str = MAIN) -> Version | None:
        return self._frozen if self._frozen and lane == MAIN else self._store.head(lane)

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        frozen = {MAIN: self._frozen.id} if self._frozen and MAIN in lanes else {}
        return {**self._store.poll(lanes), **frozen}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@dataclass
class FakeFleet:
    """Actors in virtual time over one store. Each has its own cache, as real processes do.

    An actor that yields 0 (a local step, an operation on the store) takes its tick, a second by
    default.
    """

    store: Store
    folder: Path
    fleet: FleetConfig = FLEET
    clock: FakeClock = field(default_factory=FakeClock)
    said: list[str] = field(default_factory=list)
    actors: dict[str, Iterator[float]] = field(default_factory=dict)
    wake: dict[str, float] = field(default_factory=dict)
    ticks: dict[str, float] = field(default_factory=dict)
    started: int = 0
    num_ids: int = 0
    guard: FakeGuard | None = None
    averager: FakeAverager = FakeAverager()
    wall_clock: Callable[[], float] = lambda: 1e9

    def __post_init__(self) -> None:
        if self.store.head(MAIN) is None:
            new_run(self.store, self.folder / "new", self.fleet)

    def new_id(self) -> str:
        """The same in every run of a test, so that jitter is too."""
        self.num_ids += 1
        return f"{self.num_ids:032x}"

    def run_for(self, name: str, store: Store | None = None) -> Run:
        self.started += 1
        config = replace(RunConfig(), fleet=self.fleet)
        cache = self.folder / f"{name}-{self.started}"
        cache.mkdir(parents=True, exist_ok=True)
        return reopened(store or self.store, config, cache)

    def add_merger(self, name: str = "merger", store: Store | None = None, **options: Any) -> None:
        merger = Merger(
            self.run_for(name, store),
            self.averager,
            self.guard,
            clock=self.clock,
            report=self.said.append,
            new_id=self.new_id,
            **options,
        )
        self.add(name, merger.run())

    def add_worker(
        self,
        number: int,
        name: str = "",
        store: Store | None = None,
        session_seconds: float = math.inf,
        **options: Any,
    ) -> FakeLearner:
        name = name or f"w{number}"
        learner = FakeLearner(number, **options)
        worker = Worker(
            self.run_for(name, store),
            number,
            learner,
            session_seconds=session_seconds,
            clock=self.clock,
            wall_clock=self.wall_clock,
            new_id=self.new_id,
            report=self.said.append,
        )
        self.add(name, worker.run())
        return learner

    def add(self, name: str, actor: Iterator[float]) -> None:
        self.actors[name], self.wake[name] = actor, self.clock.now

    def kill(self, name: str) -> None:
        self.actors.pop(name)

    def run_until(self, done: Callable[[], bool], seconds: float = 2000.0) -> bool:
        """Run in virtual time until `done()` or for `seconds`; whether it was done."""
        end = self.clock.now + seconds
        while self.actors and self.clock.now < end:
            if done():
                return True
            name = min(self.actors, key=lambda n: (self.wake[n], n))
            self.clock.now = max(self.clock.now, self.wake[name])
            try:
                seconds = next(self.actors[name]) or self.ticks.get(name, 1.0)
                self.wake[name] = self.clock.now + seconds
            except StopIteration:
                self.actors.pop(name)
        return done()

    def has_pushed(self, worker: int) -> bool:
        """Whether a contribution lies on the worker's lane."""
        head = self.store.head(records.lane_of(worker))
        return head is not None and records.worker_paths(worker).manifest in head.files

    def until_generation(self, gen: int, seconds: float = 2000.0) -> bool:
        return self.run_until(lambda: self.state.gen >= gen, seconds)

    @property
    def state(self) -> State:
        head = self.store.head(MAIN)
        assert head is not None
        return read_state(self.store, head)

    def global_weights(self) -> Weights:
        path = self.folder / "global"
        self.store.fetch(self.state.global_weights, path)
        return read_weights(path)

    def states(self) -> list[State]:
        """The first state of every generation; of compacted ones as their round records tell."""
        head, by_gen = self.store.head(MAIN), dict[int, State]()
        assert head is not None
        for path in sorted(head.files):
            if path.startswith(records.ROUNDS):
                state = records.state_from_json(read_json(self.store, head, path)["state"])
                by_gen[state.gen] = state
        for version in self.store.history(MAIN):
            with contextlib.suppress(Corrupt):
                state = read_state(self.store, version)
                by_gen.setdefault(state.gen, state)
        return [by_gen[gen] for gen in sorted(by_gen)]

    def accepted(self) -> list[Contribution]:
        """Every contribution that a generation names, over the whole history."""
        return [c for state in self.states() for c in state.accepted]
