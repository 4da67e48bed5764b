"""The crash matrix: every process dies before and after every one of its effects, once.

A fault-free run is traced first; then it is replayed once for each operation on the hub that it
holds, with the process that makes it killed there and a successor started. Reads are effects here
too: a process that dies after one leaves the hub as it was, but its successor finds another moment.
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from diffurefill.fleet.simulate.chaos import memory_folder
from diffurefill.fleet.simulate.kernel import Process
from diffurefill.fleet.simulate.scenario import FLEET, World
from tests.fleet.simulate.sound import expect_sound

GENERATIONS = 3
SUCCESSOR_SECONDS = 1.0
"""Sooner than a merger looks again: what the dead one pushed is found under its successor."""
PROGRESS_SECONDS = 900.0
SHARES = 3
RICH = replace(
    FLEET, downlink="update", swa_from_step=4, snapshot_every=2, snapshot_keep=1, compact_every=2
)
"""Everything a merger may publish after a generation."""


@dataclass
class Doom:
    """Kills who makes the effect number `at`, `before` or `after` it; counts what goes through.

    `name` None: effects of all processes count, and whoever makes the doomed one takes the whole
    fleet with him (`everybody`).
    """

    name: str | None = None
    at: int = -1
    how: str = "before"
    everybody: Callable[[], None] = lambda: None
    effects: Counter[str] = field(default_factory=Counter)
    ops: list[tuple[str, str]] = field(default_factory=list)
    struck: bool = False

    def fault(self, process: Process, op: str, lane: str) -> str | None:
        count = self.effects[process.name] if self.name else self.effects.total()
        self.effects[process.name] += 1
        self.ops.append((process.name, op))
        if self.struck or (self.name or process.name) != process.name or count != self.at:
            return None
        self.struck = True
        self.everybody()
        return f"kill_{self.how}"

    def seconds(self, kind: str) -> float:
        return 0.0


def fleet_of(plan: Doom, folder: Path, *, rich: bool = False) -> World:
    world = World(5, folder, RICH if rich else FLEET, plan=plan)
    world.launch_merger()
    world.launch_worker(0)
    world.launch_worker(1)
    return world


def trace(rich: bool = False) -> Doom:
    """The fault-free run."""
    plan = Doom()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        world = fleet_of(plan, Path(folder), rich=rich)
        assert world.reaches(GENERATIONS, PROGRESS_SECONDS)
        expect_sound(world, Path(folder) / "audit")
    return plan


def start_again(world: World, process: Process) -> None:
    kind = process.name.partition("#")[0]
    if kind == "merger":
        world.launch_merger()
    else:
        world.launch_worker(int(kind[1:]))


def survives(plan: Doom, folder: Path, *, rich: bool) -> None:
    """Run with `plan`, start a successor of whoever dies, and let the fleet get on."""
    world = fleet_of(plan, folder, rich=rich)
    forget = world.kernel.on_end

    def replace_dead(process: Process) -> None:
        forget(process)
        if process.ending == "killed":
            time = world.kernel.now + SUCCESSOR_SECONDS
            world.kernel.at(time, lambda: start_again(world, process))

    world.kernel.on_end = replace_dead
    assert world.kernel.run(PROGRESS_SECONDS, lambda: plan.struck)
    target = world.gen + GENERATIONS
    assert world.reaches(target, PROGRESS_SECONDS)
    assert world.kernel.run(world.kernel.now + PROGRESS_SECONDS, world.agrees)
    expect_sound(world, folder / "audit")
    refused = set(world.ledger.rejected.values())
    assert refused <= {"stale_base"}, "what a dead worker had pushed counts"


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("name", ["merger#1", "w0#2", "w1#3"])
def test_any_process_may_die_at_any_effect(name: str, how: str, rich: bool) -> None:
    num_effects = trace(rich).effects[name]
    assert num_effects > 20
    for at in range(num_effects):
        with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
            survives(Doom(name, at, how), Path(folder), rich=rich)


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("how", ["before", "after"])
def test_the_whole_fleet_may_vanish_at_any_effect_twice(how: str, share: int) -> None:
    """Twice the same distance into a life: the second fleet dies while it recovers the first."""
    for at in range(share, trace().effects.total(), SHARES):
        with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
            vanish_twice(at, how, Path(folder))


def vanish_twice(at: int, how: str, folder: Path) -> None:
    plan = Doom()
    world = fleet_of(plan, folder)

    def vanish() -> None:
        for process in world.kernel.processes:
            if process.alive and process.name != plan.ops[-1][0]:
                world.kernel.kill(process)

    for _life in range(2):
        plan.at, plan.how, plan.everybody = plan.effects.total() + at, how, vanish
        plan.struck = False
        assert world.kernel.run(world.kernel.now + PROGRESS_SECONDS, lambda: plan.struck)
        world.kernel.run(world.kernel.now + SUCCESSOR_SECONDS)
        assert not any(p.alive for p in world.kernel.processes)
        world.launch_merger()
        world.launch_worker(0)
        world.launch_worker(1)
    assert world.reaches(world.gen + 2, PROGRESS_SECONDS)
    expect_sound(world, folder / "audit")


def test_the_matrix_covers_every_kind_of_effect() -> None:
    made = {op for _, op in trace(rich=True).ops}
    assert made == {
        "selftest", "lanes", "head", "poll", "read", "stage", "fetch", "publish", "compact",
    }  # fmt: skip
