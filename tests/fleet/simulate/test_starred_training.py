"""Numbers 6 and 8 of test_starred_faults.py on a real model and real rows, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import HELD_OUT
from diffurefill.data.documents import open_corpus
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.evaluate.probe_sets import load_probes
from diffurefill.evaluate.probes import Probe
from diffurefill.fleet import records
from diffurefill.fleet.audit import audit_run
from diffurefill.fleet.create import create_run
from diffurefill.fleet.learner import TrainingLearner
from diffurefill.fleet.manage import rollback
from diffurefill.fleet.merger import Merger
from diffurefill.fleet.records import State
from diffurefill.fleet.run import Run, open_run
from diffurefill.fleet.start import averager_of
from diffurefill.fleet.worker import Worker
from diffurefill.optim.schedule import learning_rate
from diffurefill.store.base import open_store
from diffurefill.train.loop import Trainer
from tests.fleet.fakes import FakeFleet
from tests.tiny import tiny_config, write_corpus


@dataclass
class Step:
    """What a worker's optimiser did."""

    slot: int
    incarnation: int
    gen: int
    """The generation adopted before it."""
    state_step: int
    """That generation's step."""
    ahead: int
    """Steps since then, this one included."""
    trainer_step: int
    rates: set[float]
    rows: list[list[int]]


class Watched(TrainingLearner):
    """The real learner, with its optimiser watched at every step."""

    def __init__(self, trainer: Trainer, probe: Probe, incarnation: int, steps: list[Step]) -> None:
        super().__init__(trainer, probe)
        self._watched, self._incarnation, self._steps = trainer, incarnation, steps

    def adopt(self, weights: Path, state: State, ahead: int) -> dict[str, Any]:
        self._state, self._ahead = state, 0
        return super().adopt(weights, state, ahead)

    def step(self, local_step: int) -> dict[str, Any]:
        trainer, batches = self._watched, []
        loader = trainer._loader
        assert loader is not None
        real = type(loader).__next__

        def watched(self: Any) -> Any:
            batch = real(self)
            batches.append(batch.ids.tolist())
            return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(loader), "__next__", watched)
            facts = super().step(local_step)
        self._ahead += 1
        groups = [g for part in trainer.optimizer.parts.values() for g in part.param_groups]
        self._steps.append(
            Step(
                trainer.slot,
                self._incarnation,
                self._state.gen,
                self._state.step,
                self._ahead,
                trainer.step,
                {group["lr"] for group in groups},
                [row for batch in batches for row in batch],
            )
        )
        return facts


class RealFleet(FakeFleet):
    """The real learner and averager in virtual time, on a folder."""

    def __init__(self, folder: Path) -> None:
        config = tiny_config(write_corpus(folder))
        slow = replace(config.fleet, poll_seconds=1.0, log_seconds=60.0, lease_seconds=30.0)
        config = replace(config, fleet=slow)
        create_run(str(folder / "run"), config, folder / "init", lambda line: None)
        super().__init__(open_store(str(folder / "run")), folder / "disks", config.fleet)
        self.run_config, self.steps, self.trainers = config, list[Step](), list[Trainer]()
        self.add("merger", self._merger().run())

    def _open(self) -> Run:
        self.started += 1
        return open_run(self.store.uri, self.folder / str(self.started))

    def _merger(self) -> Merger:
        averager = averager_of(self.fleet)
        return Merger(self._open(), averager, clock=self.clock, report=self.said.append)

    def begin(self, number: int) -> None:
        """Start a worker; under a number that is at work, the old one is killed first."""
        self.actors.pop(f"w{number}", None)
        run = self._open()
        config, tokenizer = run.config, Tokenizer.from_json(run.tokenizer_json)
        corpus = open_corpus(config.data)
        trainer = Trainer(
            config, corpus, tokenizer, slot=number, interval_steps=config.fleet.local_steps
        )
        self.trainers.append(trainer)
        probe = load_probes(run.fetch(run.snapshot().version.ref(records.PROBE)))[HELD_OUT]
        learner = Watched(trainer, probe, self.started, self.steps)
        worker = Worker(run, number, learner, clock=self.clock, report=self.said.append)
        self.add(f"w{number}", worker.run())

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealFleet]:
    fleet = RealFleet(tmp_path)
    yield fleet
    fleet.close()


def test_8_the_learning_rate_is_that_of_the_state_s_step(real: RealFleet) -> None:
    """After every adoption, after a rollback, and after restarts in the middle of intervals."""
    real.begin(0)
    real.begin(1)
    assert real.until_generation(3)
    real.run_until(lambda: real.steps[-1].gen == 3 and real.steps[-1].ahead == 2)
    real.begin(0)  # killed in the middle of an interval, and started again
    assert real.until_generation(4)
    rollback(real.store.uri, to=2, report=real.said.append)
    assert real.state.step == 2 * real.fleet.local_steps
    assert real.until_generation(7)
    real.begin(1)
    assert real.until_generation(8)
    assert {s.gen for s in real.steps} >= {0, 1, 2, 3, 5, 6, 7}
    assert len({s.incarnation for s in real.steps}) == 4
    steps_of = {state.gen: state.step for state in real.states()}
    for s in real.steps:
        assert s.state_step == steps_of[s.gen]
        assert s.trainer_step == s.state_step + s.ahead
        assert s.rates == {learning_rate(s.trainer_step, real.run_config.optim)}
    assert audit_run(real.store, averager_of(real.fleet), real.folder / "audit").verdict == "ok"


def test_6_real_rows_of_killed_and_resumed_workers_are_those_of_an_unbroken_run(
    real: RealFleet,
) -> None:
    for life in range(5):
        real.begin(0)
        real.run_until(lambda: False, seconds=14.0 + 9.0 * life)
    real.begin(0)
    assert real.until_generation(real.state.gen + 3)
    merged = {(c.base_gen, c.incarnation) for c in real.accepted()}
    bases = [gen for gen, _ in sorted(merged)]
    assert len(bases) == len(set(bases)) >= 4
    rows = []
    for gen in bases:
        last = [s for s in real.steps if s.gen == gen][-real.fleet.local_steps :]
        assert [s.ahead for s in last] == list(range(1, real.fleet.local_steps + 1))
        rows += [row for s in last for row in s.rows]
    assert rows == unbroken(real, len(rows))


def unbroken(real: RealFleet, num_rows: int) -> list[list[int]]:
    """The slot's rows as one reader that is never stopped gives them."""
    trainer, rows = real.trainers[0], list[list[int]]()
    trainer.seek(None)
    assert trainer._loader is not None
    while len(rows) < num_rows:
        rows += next(trainer._loader).ids.tolist()
    return rows[:num_rows]
