"""One seed of chaos: a fleet under a profile of faults, then peace, and what must hold in each.

While faults go on, the ledger's invariants are checked at every version (safety). Then faults stop
and the fleet must get on: two generations within `PEACE_SECONDS`, every live worker on the same
bytes (liveness, I20). Source: spec fleet.md 4.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from diffurefill.fleet.records import GLOBAL, STATE, lane_of
from diffurefill.fleet.simulate.connection import flipped
from diffurefill.fleet.simulate.exercised import exercised
from diffurefill.fleet.simulate.faults import ChaosPlan
from diffurefill.fleet.simulate.kernel import Process
from diffurefill.fleet.simulate.profiles import MINUTE, PROFILES, Profile, variant
from diffurefill.fleet.simulate.scenario import World
from diffurefill.store.base import MAIN

PEACE_SECONDS = 40 * MINUTE
MAX_EVENTS = 20_000
"""More than any seed needs: a fleet that spins in place is a violation, not an endless test."""


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
    exercised: Counter[str]
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


class Chaos:
    """A fleet, and the hand that kills, twins and starts its processes again."""

    def __init__(
        self, seed: int, profile: Profile, folder: Path, *, keep_trace: bool = False
    ) -> None:
        self.profile, self.plan = profile, ChaosPlan(profile)
        self.world = World(
            seed,
            folder,
            variant(seed, profile),
            plan=self.plan,
            nemesis=self.plan,
            keep_trace=keep_trace,
        )
        self.kernel = self.world.kernel
        if "stale" in profile.kinds:
            self.world.hub.lag_seconds = self.plan.seconds("lag")
        self.peace = False
        self.marked: dict[str, list[str]] = {}
        """What a process suffers from, or makes others suffer, by its name."""
        forget = self.kernel.on_end
        self.kernel.on_end = lambda p: (forget(p), self._ended(p))[0]

    def run(self) -> Outcome:
        self._begin()
        self._run_until(self.profile.seconds)
        self._make_peace()
        self._account()
        world = self.world
        return Outcome(
            seed=world.seed,
            profile=self.profile.name,
            violations=world.violations,
            trace_hash=self.kernel.trace_hash,
            injected=self.plan.injected,
            outcomes=self.plan.outcomes,
            endings=Counter((p.ending or "alive").partition(":")[0] for p in self.kernel.processes),
            exercised=exercised(world),
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
        for _ in range(self.profile.num_interrupts):
            self._sometime(self._interrupt)
        for kind in self.profile.rots:
            self._sometime(functools.partial(self._rot, kind))
        for i, kind in enumerate(self.profile.lies):
            self._sometime(functools.partial(self._lie, 20 + i, kind))
        for kind, longest in self.profile.windows:
            self._sometime(functools.partial(self._open_window, kind, longest))

    def _start_worker(self, number: int, vice: str = "") -> Process:
        chance, session = self.kernel.chance, math.inf
        if not self.peace and chance.random() < self.profile.sessions:
            session = chance.uniform(60.0, 500.0)
        process = self.world.launch_worker(
            number, vice=vice, speed=chance.choice((1.0, 1.5, 3.0)), session_seconds=session
        )
        if vice:
            self._mark(process, f"vice {vice}")
        if session < math.inf:
            self._mark(process, "session ends")
        return process

    def _mark(self, process: Process, kind: str) -> None:
        """Count `kind`, and later how this process ends."""
        self.plan.injected[kind] += 1
        self.marked.setdefault(process.name, []).append(kind)

    def _sometime(self, action) -> None:
        self.kernel.at(self.kernel.chance.uniform(0.0, self.profile.seconds), action)

    def _soon(self, action) -> None:
        self.kernel.at(self.kernel.now + self.kernel.chance.uniform(5.0, 200.0), action)

    def _ended(self, process: Process) -> None:
        """A person, or a notebook's owner, starts it again after a while."""
        self.plan.ended(process)
        kind, how = process.name.partition("#")[0], (process.ending or "").partition(":")[0]
        for mark in self.marked.get(process.name, ()):
            self.plan.outcomes[mark, f"ended: {how}"] += 1
        if how == "Corrupt":
            clear = "rollback" in (process.ending or "")
            self.world.ledger.check("damage", clear, f"{process.name} does not say what to do")
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
            self._mark(self.world.launch_merger(), "second merger")
        else:
            twin = self._start_worker(chance.choice(self.numbers))
            self._mark(twin, "second worker under a number")

    def _lose_everything(self) -> None:
        self.plan.injected["fleet lost"] += 1
        for process in [p for p in self.kernel.processes if p.alive]:
            self.kernel.kill(process)

    def _roll_back(self) -> None:
        self._mark(self.world.launch_roll_back(), "rollback")

    def _interrupt(self) -> None:
        for process in self.world.living("merger#"):
            process.interrupted = True
            self._mark(process, "merger interrupted")

    def _rot(self, kind: str) -> None:
        """A file that the newest version names is damaged where it lies; in a while a person, told
        by every process that needs it, looks after it."""
        hub, path = self.world.hub, GLOBAL if kind == "global" else STATE
        head = hub.head(MAIN)
        ref = head.files[path] if head else None
        if ref is None or ref.sha256 not in hub.blobs:
            return
        self.plan.injected[f"{kind} damaged at rest"] += 1
        hub.damaged[ref.sha256] = flipped(hub.blobs[ref.sha256])
        self.kernel.note("rot", kind)
        self._soon(functools.partial(self._look_after, path, kind))

    def _look_after(self, path: str, kind: str, *, again: bool = False) -> None:
        head = self.world.hub.head(MAIN)
        if head is None or head.files[path].sha256 not in self.world.hub.damaged:
            if not again:
                self.plan.outcomes[f"{kind} damaged at rest", "nobody needed it any more"] += 1
            return
        if not self.world.living("person#"):
            self._mark(self.world.launch_roll_back(by_default=True), f"person mends the {kind}")
        self._soon(functools.partial(self._look_after, path, kind, again=True))

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

    def _account(self) -> None:
        """What became of contributions that should not be merged, and of marked processes."""
        ledger, tell = self.world.ledger, self.plan.outcomes
        for key, kind in ledger.lies.items():
            what = f"rejected: {ledger.rejected[key]}" if key in ledger.rejected else "not pushed"
            tell[f"lie: {kind}", "inherited and merged" if key in ledger.accepted else what] += 1
        vicious = {
            int(name[1:].partition("#")[0]): marks[0]
            for name, marks in self.marked.items()
            if marks[0].startswith("vice")
        }
        for key, reason in ledger.rejected.items():
            if reason == "corrupt":
                tell["damaged", "rejected: corrupt"] += 1
            if key[0] in vicious:
                tell[vicious[key[0]], f"rejected: {reason}"] += 1
        for process in self.kernel.processes:
            for mark in self.marked.get(process.name, ()) if process.alive else ():
                tell[mark, "goes on"] += 1

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
