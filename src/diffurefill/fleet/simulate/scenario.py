"""A whole fleet on one simulated hub: who is launched, killed, twinned, started again.

`World` holds one run. Processes are launched as a person or a notebook would: each with a new
identity, an empty disk and a clock of its own. Nothing in here decides what goes wrong: that is
the plan's (chaos.py, exhaustive.py) and the tests'.
"""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from diffurefill import config as configs
from diffurefill.config import FleetConfig, RunConfig
from diffurefill.fleet import records
from diffurefill.fleet.merger import Merger
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import State
from diffurefill.fleet.run import Run
from diffurefill.fleet.simulate import operators, provenance
from diffurefill.fleet.simulate.connection import Plan, SimStore
from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.invariants import Ledger
from diffurefill.fleet.simulate.kernel import Body, Costs, Kernel, Mercy, Nemesis, Process
from diffurefill.fleet.simulate.provenance import ExactAverager, ExactGuard, ExactLearner
from diffurefill.fleet.worker import Worker
from diffurefill.store.base import MAIN, Change, dump_json

FLEET = FleetConfig(
    local_steps=4,
    min_fresh=2,
    grace_seconds=60.0,
    live_seconds=400.0,
    lease_seconds=150.0,
    poll_seconds=10.0,
    training_poll_seconds=10.0,
    log_seconds=60.0,
    min_partial_steps=2,
)
"""Rounds of about a minute and a half."""


class NoFaults:
    """The plan in which the hub always answers."""

    def fault(self, process: Process, op: str, lane: str) -> str | None:
        return None

    def seconds(self, kind: str) -> float:
        return 0.0


@dataclass(eq=False)
class World:
    """One run, its hub and every process that ever worked on it. `folder` holds their disks."""

    seed: int
    folder: Path
    fleet: FleetConfig = FLEET
    costs: Costs = field(default_factory=Costs)
    plan: Plan = field(default_factory=NoFaults)
    nemesis: Nemesis = field(default_factory=Mercy)
    hub_commits_per_hour: int | None = None
    keep_trace: bool = False

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.seed, self.nemesis, keep_trace=self.keep_trace)
        self.kernel.on_end = self._forget_disk
        self.hub = SimHub(lambda: self.kernel.now, self.hub_commits_per_hour)
        self.ledger = Ledger(self.hub, self.kernel, self.fleet).watch()
        self.config = replace(RunConfig(), fleet=self.fleet)
        self.learners: dict[str, ExactLearner] = {}
        """By launch name."""
        self.wall_error = 0.0
        """What every wall clock is off by: only logs may show it."""
        self.num_restaged = 0
        """Damaged files that were put back from a copy, for want of a generation to return to."""
        self._num_launched = 0
        self._make_run()

    @property
    def violations(self) -> list[str]:
        bugs = [f"bug, seed {self.seed}: {bug}" for bug in self.kernel.bugs]
        return [*self.ledger.violations, *bugs]

    @property
    def gen(self) -> int:
        return self.ledger.state["gen"]

    def _make_run(self) -> None:
        weights = self.hub.put(provenance.dump_weights({}))
        state = State(
            run_id="simulated",
            config_sha=configs.digest(self.config),
            schema_sha="schema",
            corpus_sha="corpus",
            global_weights=weights,
        )
        files: dict[str, Change] = {
            records.STATE: dump_json(records.to_json(state)),
            records.CONFIG: configs.dumps(self.config).encode(),
            records.TOKENIZER: b"{}",
            records.GLOBAL: weights,
        }
        first = self.hub.publish(MAIN, files, expect=None, nonce=self.new_id(), writer="init")
        self.hub.published_at[MAIN, first.id] = -math.inf  # long ago: no head lags behind it

    def new_id(self) -> str:
        return f"{self.kernel.chance.getrandbits(128):032x}"

    def wall_clock(self) -> float:
        return 1.7e9 + self.kernel.now + self.wall_error

    # --- processes -------------------------------------------------------------------------------

    def launch_merger(self, name: str = "merger") -> Process:
        def make(process: Process) -> Body:
            merger = Merger(
                self._open(process),
                ExactAverager(),
                ExactGuard() if self.fleet.guard_rows else None,
                clock=process.clock,
                report=_silent,
                new_id=self.new_id,
            )
            return _until_interrupted(process, merger)

        return self.kernel.launch(self._unique(name), make)

    def launch_worker(
        self,
        number: int,
        name: str = "",
        *,
        vice: str = "",
        speed: float = 1.0,
        session_seconds: float = math.inf,
    ) -> Process:
        def make(process: Process) -> Body:
            learner = self.make_learner(number, process, vice)
            self.learners[process.name] = learner
            worker = Worker(
                self._open(process),
                number,
                learner,
                session_seconds=session_seconds,
                clock=process.clock,
                wall_clock=self.wall_clock,
                report=_silent,
                new_id=self.new_id,
            )
            return worker.run()

        return self.kernel.launch(self._unique(name or f"w{number}"), make, speed=speed)

    def make_learner(self, number: int, process: Process, vice: str) -> ExactLearner:
        return ExactLearner(
            number,
            process.name,
            spend=process.spend,
            step_seconds=self.costs.step_seconds / process.speed,
            vice=vice,
            keeps_drift=self.fleet.adoption == "keep_drift",
            on_adopt=self.ledger.adopted,
        )

    def launch_roll_back(self, *, by_default: bool = False) -> Process:
        """A person goes back to a generation whose files are all still there, or to the one that
        the command chooses."""

        def make(process: Process) -> Body:
            whole = [g for g in self.ledger.first if 0 < g <= self.gen and self._is_whole(g)]
            to = self.kernel.chance.choice(whole) if whole and not by_default else None
            jitter = random.Random(self.kernel.chance.random())
            return operators.roll_back(self._open(process), to, jitter, self._restage)

        return self.kernel.launch(self._unique("person"), make)

    def _restage(self) -> None:
        head = self.hub.head(MAIN)
        for ref in head.files.values() if head else ():
            self.num_restaged += self.hub.damaged.pop(ref.sha256, None) is not None

    def _is_whole(self, gen: int) -> bool:
        state = self.ledger.first[gen]
        refs = [state["global_weights"], *(state[k]["ref"] for k in ("ema", "swa") if state[k])]
        return all(ref["sha256"] in self.hub.blobs for ref in refs)

    def launch_liar(self, number: int, kind: str) -> Process:
        def make(process: Process) -> Body:
            return operators.lie(
                self._open(process),
                self._patience(),
                number,
                kind,
                process.name,
                self.ledger.lies.__setitem__,
            )

        return self.kernel.launch(self._unique("liar"), make)

    def _patience(self) -> Patience:
        return Patience(_silent, random.Random(self.kernel.chance.random()))

    def _unique(self, name: str) -> str:
        """Launch names never repeat: elements of weights are named by them."""
        self._num_launched += 1
        return f"{name}#{self._num_launched}"

    def _open(self, process: Process) -> Run:
        store = SimStore(self.hub, process, self.plan, self.costs)
        cache = self._disk(process)
        cache.mkdir(parents=True)
        return Run(store, self.config, cache, "{}")

    def _disk(self, process: Process) -> Path:
        return self.folder / process.name.replace("#", "-")

    def _forget_disk(self, process: Process) -> None:
        shutil.rmtree(self._disk(process), ignore_errors=True)

    def living(self, kind: str) -> list[Process]:
        """Processes alive whose name begins with `kind`, in order of launch."""
        return [p for p in self.kernel.processes if p.alive and p.name.startswith(kind)]

    # --- what is waited for ----------------------------------------------------------------------

    def reaches(self, gen: int, seconds: float) -> bool:
        """Let the fleet work until generation `gen`, or for `seconds`."""
        return self.kernel.run(self.kernel.now + seconds, lambda: self.gen >= gen)

    def agrees(self) -> bool:
        """Whether every live worker trains from the newest global's bytes, or from ones that a
        contribution may still start from."""
        state, late = self.ledger.state, self.fleet.max_staleness
        bases = [state["global_weights"], *(s["ref"] for s in state["recent"][:late])]
        names, shas = [p.name for p in self.living("w")], {ref["sha256"] for ref in bases}
        return bool(names) and all(
            name in self.learners and self.learners[name].adopted[1] in shas for name in names
        )


def _until_interrupted(process: Process, merger: Merger) -> Body:
    for seconds in merger.run():
        yield seconds
        if process.interrupted:
            merger.term.release()
            return


def _silent(line: str) -> None:
    pass
