"""One state of a searched fleet: the hub as it is then, and where every actor stands.

States share what is the same in them, and nothing in one is ever changed: a publish makes a copy
of the hub and of the ledger that watches it, which go on apart from the originals.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.invariants import Ledger
from diffurefill.fleet.simulate.reexecute import Answer, Ask, Place

Left = tuple[int, int, int, int]
"""What a schedule may still hold: preemptions, crashes, lost answers, idle wakings."""

SLEEP_SECONDS = 10.0
"""Who waits so long is asleep; shorter waits are pauses between two attempts."""


@dataclass(frozen=True, eq=False)
class Truth:
    """The hub and what the ledger made of its history. Nobody changes one; equal ones are one."""

    hub: SimHub
    ledger: Ledger
    lanes: Mapping[str, tuple[int, ...]]
    """Each lane's versions, by the numbers that the search gave them."""
    after: dict[int, tuple[Truth, object, Answer]] = field(default_factory=dict)
    """What the publish of a place (by its id) made of it, and the answer with its key."""


@dataclass(frozen=True, eq=False)
class Moment:
    """One state of the fleet."""

    truth: Truth
    places: tuple[Place, ...]
    launches: tuple[int, ...]
    current: int | None
    """Who is between two waits; anybody else's move interrupts it."""
    left: Left
    depth: int = 0
    before: tuple[Moment, str] | None = None


@dataclass(frozen=True)
class Move:
    slot: int
    fate: str
    """`""`, or of a publish `lost answer`, `lost request` or `dies`."""
    left: Left


def covers(left: Left, other: Left) -> bool:
    return all(map(int.__ge__, left, other))


def look(truth: Truth, ask: Ask) -> tuple[object, Answer]:
    """An answer that changes nothing, and a key that is the same for equal answers."""
    hub, lanes = truth.hub, ask.lanes
    match ask.op:
        case "lanes":
            return tuple(hub.lanes()), hub.lanes()
        case "poll":
            heads = hub.poll(list(lanes))
            return tuple(heads.items()), heads
        case "lookup":
            version = hub.lookup(lanes[0], ask.nonce)
        case _:
            version = hub.head(lanes[0])
    if version is None:
        return None, None
    place = hub.lanes_kept[version.lane].index(version)
    return truth.lanes[version.lane][place], version


def branched(hub: SimHub, ledger: Ledger) -> tuple[SimHub, Ledger]:
    """Copies that may go on apart from the originals. Bytes are shared: nothing deletes any."""
    hub, ledger = copy.copy(hub), copy.copy(ledger)
    hub.lanes_kept = {lane: list(kept) for lane, kept in hub.lanes_kept.items()}
    hub.num_published = dict(hub.num_published)
    hub.published_at, hub.commit_times = dict(hub.published_at), hub.commit_times.copy()
    hub.on_publish, hub.on_compact = [], []
    for name, value in vars(ledger).items():
        if isinstance(value, (dict, list, set)):
            setattr(ledger, name, value.copy())
    ledger.hub = hub
    ledger.watch()
    return hub, ledger


def sleeps(place: Place) -> bool:
    return place.waited >= SLEEP_SECONDS


def has_news(truth: Truth, place: Place) -> bool:
    """Whether a sleeper that wakes would see anything new in what it asks first."""
    assert place.ask is not None
    heads = truth.hub.poll(list(place.ask.lanes) or truth.hub.lanes())
    return any(place.seen.get(lane) != head for lane, head in heads.items())
