"""One seed of chaos: a fleet under a profile of faults, then peace, and what must hold in each.

While faults go on, the ledger's invariants are checked at every version (safety). Then faults stop
and the fleet must get on: two generations within `PEACE_SECONDS`, every live worker on the same
bytes (liveness, I20). Source: spec fleet.md 4.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from diffurefill.config import FleetConfig
from diffurefill.fleet.records import lane_of
from diffurefill.fleet.simulate.faults import HOUR, MINUTE, ChaosPlan, Profile
from diffurefill.fleet.simulate.kernel import Process
from diffurefill.fleet.simulate.operators import LIES
from diffurefill.fleet.simulate.scenario import FLEET, World

PEACE_SECONDS = 40 * MINUTE
MAX_EVENTS = 60_000
"""More than any seed needs: a fleet that spins in place is a violation, not an endless test."""

NETWORK = {
    "busy": 0.03, "quota": 0.02, "lost_request": 0.02, "lost_answer": 0.04, "late": 0.03,
    "doubled": 0.03, "slow": 0.01, "stale": 0.1,
}  # fmt: skip
BYTES = {"flip": 0.05, "truncate": 0.05, "flip_twice": 0.02, "damaged": 0.03, "disk_full": 0.005}
CRASHES = {"kill_before": 0.015, "kill_after": 0.015}

PROFILES = {
    p.name: p
    for p in (
        Profile(name="network", kinds=NETWORK, delay=0.01),
        Profile(name="crashes", kinds=CRASHES, kill=0.002, num_losses=1, num_twins=1),
        Profile(name="twins", kinds={"late": 0.03, "stale": 0.05}, pause=0.004, num_twins=3),
        Profile(name="bytes", kinds=BYTES, kill=0.001),
        Profile(
            name="outages",
            kinds={"lost_answer": 0.01},
            windows=(("down", 2 * HOUR), ("quota", 20 * MINUTE), ("partition", 600.0),
                     ("full", 300.0), ("revoked", 300.0)),
        ),
        Profile(name="vices", vices=("sneaky_nan", "nan", "huge", "poison"), kill=0.001),
        Profile(name="lies", lies=tuple(LIES), kinds={"late": 0.02}, pause=0.001),
        Profile(
            name="rewrites",
            kinds={"stale": 0.1, "late": 0.02, **CRASHES},
            num_rollbacks=2,
                        pause=0.002,
        ),
        Profile(
            name="mixed",
            kinds={kind: rate / 3 for kind, rate in {**NETWORK, **BYTES, **CRASHES}.items()},
            kill=0.0005, pause=0.001, delay=0.005,
            windows=(("down", 600.0), ("partition", 300.0)),
            num_twins=1, num_losses=1, num_rollbacks=1, num_clock_jumps=2,
            vices=("sneaky_nan",),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed came to. `violations` is empty for a sound fleet."""

    seed: int
    profile: str
    violations: list[str]
    trace_hash: str
    injected: Counter[str]
    outcomes: Counter[tuple[str, str]]
    endings: Counter[str]
    generations: int
    events: int
    trace: list[str] = field(default_factory=list)


def run_seed(
    seed: int, profile: str | Profile | None = None, *, keep_trace: bool = False
) -> Outcome:
    """One life of a fleet. `profile` None: the seed chooses."""
    if profile is None:
        profile = list(PROFILES)[seed % len(PROFILES)]
    chosen = PROFILES[profile] if isinstance(profile, str) else profile
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=memory_folder()) as folder:
        return Chaos(seed, chosen, Path(folder), keep_trace=keep_trace).run()


def memory_folder() -> str | None:
    """Where a disk is memory, if there is such a place: a seed touches a thousand small files."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def variant(seed: int) -> FleetConfig:
    """Every optional part of the protocol is on in some seeds."""
    chance = random.Random(seed)
    return replace(
        FLEET,
        max_staleness=chance.choice((0, 0, 1)),
        swa_from_step=chance.choice((None, 8)),
        snapshot_every=chance.choice((0, 2)),
        snapshot_keep=2,
        compact_every=chance.choice((0, 0, 1, 3)),
        downlink=chance.choice(("full", "full", "update")),
        min_fresh=chance.choice((1, 2, 2)),
        grace_from=chance.choice(("nth", "first")),
    )


class Chaos:
    """A fleet, and the hand that kills, twins and starts its processes again."""

    def __init__(
        self, seed: int, profile: Profile, folder: Path, *, keep_trace: bool = False
    ) -> None:
        self.profile, self.plan = profile, ChaosPlan(profile)
        self.world = World(
            seed, folder, variant(seed), plan=self.plan, nemesis=self.plan, keep_trace=keep_trace
        )
        self.kernel = self.world.kernel
        self.peace = False
        forget = self.kernel.on_end
        self.kernel.on_end = lambda p: (forget(p), self._ended(p))[0]

    def run(self) -> Outcome:
        self._begin()
        self._run_until(self.profile.seconds)
        self._make_peace()
        world = self.world
        return Outcome(
            seed=world.seed,
            profile=self.profile.name,
            violations=world.violations,
            trace_hash=self.kernel.trace_hash,
            injected=self.plan.injected,
            outcomes=self.plan.outcomes,
            endings=Counter((p.ending or "alive").partition(":")[0] for p in self.kernel.processes),
            generations=world.gen,
            events=self.kernel.events,
            trace=self.kernel.trace,
        )

    # --- the fleet -------------------------------------------------------------------------------

    def _begin(self) -> None:
        chance, world = self.kernel.chance, self.world
        self.numbers = list(range(chance.randint(1, 3)))
        world.launch_merger()
        for number in self.numbers:
            self._start_worker(number)
        for i, vice in enumerate(self.profile.vices):
            self._sometime(functools.partial(self._start_worker, len(self.numbers) + i, vice))
        for _ in range(self.profile.num_twins):
            self._sometime(self._twin)
        for _ in range(self.profile.num_losses):
            self._sometime(self._lose_everything)
        for _ in range(self.profile.num_clock_jumps):
            self._sometime(self._jump_clocks)
        for _ in range(self.profile.num_rollbacks):
            self._sometime(self._roll_back)
        for i, kind in enumerate(self.profile.lies):
            self._sometime(functools.partial(self._lie, 20 + i, kind))
        for kind, longest in self.profile.windows:
            self._sometime(functools.partial(self._open_window, kind, longest))

    def _start_worker(self, number: int, vice: str = "") -> None:
        if vice:
            self.plan.injected[f"vice {vice}"] += 1
        self.world.launch_worker(
            number, vice=vice, speed=self.kernel.chance.choice((1.0, 1.5, 3.0))
        )

    def _sometime(self, action) -> None:
        self.kernel.at(self.kernel.chance.uniform(0.0, self.profile.seconds), action)

    def _soon(self, action) -> None:
        self.kernel.at(self.kernel.now + self.kernel.chance.uniform(5.0, 200.0), action)

    def _ended(self, process: Process) -> None:
        """A person, or a notebook's owner, starts it again after a while."""
        self.plan.ended(process)
        kind = process.name.partition("#")[0]
        if process.ending is not None and process.ending.startswith(("Fenced", "Taken")):
            self.world.ledger.fenced(process.name, lane_of(int(kind[1:])))
        if kind not in ("person", "liar"):
            self._soon(lambda: self._start_again(process))

    def _start_again(self, process: Process) -> None:
        kind = process.name.partition("#")[0]
        if any(p.name.startswith(f"{kind}#") for p in self.kernel.processes if p.alive):
            return
        if kind == "merger":
            self.world.launch_merger()
        elif not self.peace or int(kind[1:]) in self.numbers:
            self._start_worker(int(kind[1:]))

    # --- what befalls it -------------------------------------------------------------------------

    def _twin(self) -> None:
        chance = self.kernel.chance
        if chance.random() < 0.5:
            self.plan.injected["second merger"] += 1
            self.world.launch_merger()
        else:
            self.plan.injected["second worker under a number"] += 1
            self._start_worker(chance.choice(self.numbers))

    def _lose_everything(self) -> None:
        self.plan.injected["fleet lost"] += 1
        for process in [p for p in self.kernel.processes if p.alive]:
            self.kernel.kill(process)

    def _roll_back(self) -> None:
        self.plan.injected["rollback"] += 1
        self.world.launch_roll_back()

    def _lie(self, number: int, kind: str) -> None:
        self.plan.injected[f"lie: {kind}"] += 1
        if kind == "zombie":
            number = self.kernel.chance.choice(self.numbers)
        self.world.launch_liar(number, kind)

    def _jump_clocks(self) -> None:
        self.plan.injected["wall clock jump"] += 1
        self.world.wall_error += self.kernel.chance.choice((-3600.0, 3600.0))

    def _open_window(self, kind: str, longest: float) -> None:
        who = None
        alive = [p.name for p in self.kernel.processes if p.alive]
        if kind == "partition":
            if not alive:
                return
            who = self.kernel.chance.choice(alive)
        if self.peace:
            return
        window = (kind, who)
        self.plan.windows.append(window)
        seconds = longest * self.kernel.chance.uniform(0.2, 1.0)
        self.kernel.note("window", kind, f"{seconds:.3f}")
        self.kernel.at(self.kernel.now + seconds, lambda: self._close_window(window))

    def _close_window(self, window: tuple[str, str | None]) -> None:
        if window in self.plan.windows:
            self.plan.windows.remove(window)

    # --- peace -----------------------------------------------------------------------------------

    def _run_until(self, time: float) -> None:
        self.kernel.run(time, lambda: self.kernel.events > MAX_EVENTS)

    def _make_peace(self) -> None:
        """No more faults; whoever is stopped goes on, whoever is missing is started again."""
        world, kernel = self.world, self.kernel
        self.peace = True
        self.plan.stop()
        for process in kernel.processes:
            process.paused_until = 0.0
        for kind in ("merger", *(f"w{n}" for n in self.numbers)):
            if not world.living(f"{kind}#"):
                if kind == "merger":
                    world.launch_merger()
                else:
                    self._start_worker(int(kind[1:]))
        target = world.gen + 2
        end = kernel.now + PEACE_SECONDS

        def done() -> bool:
            return kernel.events > MAX_EVENTS or (world.gen >= target and world.agrees())

        kernel.run(end, done)
        if world.gen < target:
            what = f"generation {world.gen} after {PEACE_SECONDS:.0f} s of peace, not {target}"
            world.ledger.check("I20", False, what)
        elif not world.agrees():
            world.ledger.check("I20", False, "live workers do not train from the same bytes")
