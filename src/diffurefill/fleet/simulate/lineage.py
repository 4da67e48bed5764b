"""The real loader in a simulated fleet: which rows of text the merged weights have really seen.

Workers are killed anywhere, doubled, cut short and started again; people roll back; the whole
fleet is lost. At the end the elements of the last global name the intervals in its lineage, and
the rows of those intervals must be each slot's unbroken row stream: none twice, none left out.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffurefill.config import DataConfig
from diffurefill.data.documents import Corpus
from diffurefill.data.loader import Loader
from diffurefill.data.packing import Position, Rows
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.fleet.records import State
from diffurefill.fleet.simulate.kernel import Process
from diffurefill.fleet.simulate.provenance import ExactLearner
from diffurefill.fleet.simulate.scenario import FLEET, World

BATCH_ROWS = 2
ROUND_SECONDS = 600.0
"""More than a round takes, unless everyone is gone."""

OpenLoader = Callable[[int, Position | None], Loader]


@dataclass
class ReadingLearner(ExactLearner):
    """Every step takes a batch of real rows; the cursor is the loader's."""

    open_loader: OpenLoader | None = None
    seen: dict[str, list[str]] = field(default_factory=dict)
    """Hashes of the rows behind each element it contributed; shared by all learners."""
    taken: list[str] = field(default_factory=list)
    position: dict[str, Any] = field(default_factory=dict)
    loader: Loader | None = None

    def adopt(self, weights: Path, state: State, ahead: int) -> dict[str, Any]:
        facts = super().adopt(weights, state, ahead)
        cursor = state.cursor(self.number)
        position = Position.from_json(cursor) if cursor else Position()
        if position.num_rows == 0:
            position = replace(position, step=state.step)
        assert self.open_loader is not None
        self.loader = self.open_loader(self.number, position)
        self.position, self.taken = position.to_json(), []
        return facts

    def step(self, local_step: int) -> dict[str, Any]:
        facts = super().step(local_step)
        assert self.loader is not None
        rows = next(self.loader)
        self.taken += row_hashes(rows)
        self.position = rows.position.to_json()
        return facts

    def cursor(self) -> dict[str, Any]:
        return {**super().cursor(), **self.position}

    def save_delta(self, base: Path, dest: Path) -> float:
        norm = super().save_delta(base, dest)
        self.seen[f"{self.name}.{self.num_intervals}"] = self.taken
        self.taken = []
        return norm


def row_hashes(rows: Rows) -> list[str]:
    columns = (rows.ids, rows.doc_ids, rows.span_ids)
    return [
        hashlib.sha256(b"".join(column[row].tobytes() for column in columns)).hexdigest()
        for row in range(len(rows.ids))
    ]


@dataclass(eq=False, kw_only=True)
class ReadingWorld(World):
    """A world whose workers read."""

    open_loader: OpenLoader
    seen: dict[str, list[str]] = field(default_factory=dict)

    def make_learner(self, number: int, process: Process, vice: str) -> ExactLearner:
        return ReadingLearner(
            number,
            process.name,
            spend=process.spend,
            step_seconds=self.costs.step_seconds / process.speed,
            on_adopt=self.ledger.adopted,
            open_loader=self.open_loader,
            seen=self.seen,
        )


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """`repeated` and `skipped` count rows against the slots' unbroken streams; `wasted` rows were
    read by intervals that are not in the last global."""

    generations: int
    intervals: int
    rows: int
    repeated: int
    skipped: int
    wasted: int
    launches: int
    rollbacks: int
    violations: list[str]


class LineageRun:
    """One run of about `rounds` generations; `seed` decides everything."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        corpus: Corpus,
        tokenizer: Tokenizer,
        data: DataConfig,
        *,
        workers: int = 3,
    ) -> None:
        # An EMA of exact fractions grows without bound; it is no part of what is asked here.
        fleet = replace(FLEET, ema_decay=0.0)

        def open_loader(slot: int, position: Position | None) -> Loader:
            return Loader(
                corpus,
                tokenizer,
                data=data,
                seed=seed,
                slot=slot,
                interval_rows=fleet.local_steps * BATCH_ROWS,
                batch_rows=BATCH_ROWS,
                position=position,
                prefetch=0,
            )

        self._open_loader, self._workers = open_loader, workers
        self.world = ReadingWorld(seed, folder, fleet, open_loader=open_loader)
        self._kernel, self._chance = self.world.kernel, self.world.kernel.chance
        self._launches = self._rollbacks = 0

    def run(self, rounds: int) -> Lineage:
        self._fill_up()
        while self.world.gen < rounds:
            self._disturb()
            self.world.reaches(self.world.gen + 1, self._chance.uniform(20.0, ROUND_SECONDS))
            self._fill_up()
        return self._account()

    # --- what goes wrong -------------------------------------------------------------------------

    def _fill_up(self) -> None:
        if not self.world.living("merger"):
            self.world.launch_merger()
        for number in range(self._workers):
            if not self.world.living(f"w{number}#"):
                self._launch(number)

    def _launch(self, number: int) -> None:
        self._launches += 1
        session = self._chance.uniform(60.0, 500.0) if self._chance.random() < 0.3 else math.inf
        speed = self._chance.choice((0.5, 1.0, 1.5))
        self.world.launch_worker(number, speed=speed, session_seconds=session)

    def _disturb(self) -> None:
        """At most one of each kind a round, at a moment of its own."""
        for kind, probability in (
            (self._kill_worker, 0.5),
            (self._twin, 0.2),
            (self._kill_merger, 0.1),
            (self._roll_back, 0.01),
            (self._lose_all, 0.01),
        ):
            if self._chance.random() < probability:
                self._kernel.at(self._kernel.now + self._chance.uniform(0.0, 120.0), kind)

    def _kill_worker(self) -> None:
        if living := self.world.living("w"):
            self._kernel.kill(self._chance.choice(living))

    def _twin(self) -> None:
        self._launch(self._chance.randrange(self._workers))

    def _kill_merger(self) -> None:
        for process in self.world.living("merger"):
            self._kernel.kill(process)

    def _roll_back(self) -> None:
        if self.world.gen > 1:
            self._rollbacks += 1
            self.world.launch_roll_back()

    def _lose_all(self) -> None:
        for process in [p for p in self._kernel.processes if p.alive]:
            self._kernel.kill(process)

    # --- what came of it -------------------------------------------------------------------------

    def _account(self) -> Lineage:
        world = self.world
        merged = self._merged_rows(world.ledger.elements)
        repeated = skipped = 0
        for slot, found in merged.items():
            expected = self._unbroken(slot, len(found))
            # In a later epoch the same row may rightly come again.
            repeated += (Counter(found) - Counter(expected)).total()
            skipped += (Counter(expected) - Counter(found)).total()
            if found != expected:
                world.ledger.violations.append(f"slot {slot}: rows in another order")
        num_rows = sum(map(len, merged.values()))
        return Lineage(
            generations=world.gen,
            intervals=sum(element in world.seen for element in self._elements()),
            rows=num_rows,
            repeated=repeated,
            skipped=skipped,
            wasted=sum(map(len, world.seen.values())) - num_rows,
            launches=self._launches,
            rollbacks=self._rollbacks,
            violations=world.violations,
        )

    def _elements(self) -> list[str]:
        return list(self.world.ledger.weights[self.world.gen])

    def _merged_rows(self, entered: Mapping[str, int]) -> dict[int, list[str]]:
        """By slot, the rows behind the last global's elements in the order of their merges."""
        rows: dict[int, list[str]] = defaultdict(list)
        for element in sorted(self._elements(), key=entered.__getitem__):
            rows[int(element[1:].partition("#")[0])] += self.world.seen[element]
        return rows

    def _unbroken(self, slot: int, num_rows: int) -> list[str]:
        with self._open_loader(slot, None) as loader:
            stream = itertools.chain.from_iterable(map(row_hashes, loader))
            return list(itertools.islice(stream, num_rows))
