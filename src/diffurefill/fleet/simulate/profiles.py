"""What a seed goes through: profiles of faults, and which optional parts of the protocol are on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from diffurefill.config import FleetConfig
from diffurefill.fleet.simulate.operators import LIES
from diffurefill.fleet.simulate.scenario import FLEET

MINUTE = 60.0
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How often what goes wrong. Rates are per store operation or per step of a process."""

    name: str
    kinds: dict[str, float] = field(default_factory=dict)
    """Fault of a store operation -> its share of the operations it can befall."""
    kill: float = 0.0
    pause: float = 0.0
    delay: float = 0.0
    windows: tuple[tuple[str, float], ...] = ()
    """(kind, longest seconds) of outages: each happens once, at a random time."""
    num_twins: int = 0
    num_losses: int = 0
    """Times the whole fleet dies at one moment."""
    num_rollbacks: int = 0
    num_clock_jumps: int = 0
    num_interrupts: int = 0
    """Times that a person stops the merger with Ctrl-C, which gives its term up."""
    sessions: float = 0.0
    """Share of the workers whose session is limited: they end it themselves."""
    vices: tuple[str, ...] = ()
    """Each is the vice of one worker launched on top of the others."""
    lies: tuple[str, ...] = ()
    """Contributions that are forged, each once."""
    rots: tuple[str, ...] = ()
    """Files of the main lane that are damaged where they lie, until a person helps."""
    guarded: bool = True
    seconds: float = 900.0
    """How long faults go on."""


NETWORK = {
    "busy": 0.03, "quota": 0.02, "lost_request": 0.02, "lost_answer": 0.04, "late": 0.03,
    "doubled": 0.03, "slow": 0.01, "stale": 0.1, "back": 0.02,
}  # fmt: skip
BYTES = {"flip": 0.05, "truncate": 0.05, "flip_twice": 0.02, "damaged": 0.03, "disk_full": 0.005}
CRASHES = {"kill_before": 0.015, "kill_after": 0.015}
MIXED = {kind: rate / 3 for kind, rate in {**NETWORK, **BYTES, **CRASHES}.items()}

PROFILES = {
    p.name: p
    for p in (
        Profile(name="network", kinds=NETWORK, delay=0.01),
        Profile(name="crashes", kinds=CRASHES, kill=0.002, num_losses=1, num_twins=1,
                num_interrupts=1, sessions=0.5),
        Profile(name="twins", kinds={"late": 0.03, "stale": 0.05}, pause=0.004, num_twins=3,
                num_interrupts=1),
        Profile(name="bytes", kinds=BYTES, kill=0.001),
        Profile(
            name="outages",
            kinds={"lost_answer": 0.01},
            windows=(("down", 2 * HOUR), ("quota", 20 * MINUTE), ("partition", 600.0),
                     ("full", 300.0), ("revoked", 300.0)),
            sessions=0.2,
        ),
        Profile(name="vices", vices=("sneaky_nan", "nan", "huge", "poison"), kill=0.001),
        Profile(name="unguarded", vices=("huge", "sneaky_nan"), guarded=False, sessions=0.5),
        Profile(name="lies", lies=tuple(LIES), kinds={"late": 0.02}, pause=0.001),
        Profile(
            name="rewrites",
            kinds={"stale": 0.1, "late": 0.02, **CRASHES},
            num_rollbacks=2,
            pause=0.002,
        ),
        Profile(name="rot", rots=("global", "state"), kill=0.001, kinds={"flip": 0.02}),
        Profile(
            name="mixed",
            kinds=MIXED,
            kill=0.0005, pause=0.001, delay=0.005,
            windows=(("down", 600.0), ("partition", 300.0)),
            num_twins=1, num_losses=1, num_rollbacks=1, num_clock_jumps=2, num_interrupts=1,
            sessions=0.2, vices=("sneaky_nan",),
        ),
    )
}  # fmt: skip


def variant(seed: int, profile: Profile) -> FleetConfig:
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
        grace_seconds=chance.choice((4.0, FLEET.grace_seconds)),
        min_partial_steps=chance.choice((1, 3)),
        min_fresh=chance.choice((1, 2, 2)),
        grace_from=chance.choice(("nth", "first")),
        adoption=chance.choice(("replace", "replace", "keep_drift")),
        guard_rows=FLEET.guard_rows if profile.guarded else 0,
    )
