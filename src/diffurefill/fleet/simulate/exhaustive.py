"""Every interleaving of a small fleet's effects within stated bounds, checked at every publish.

Two mergers, two workers, one local step an interval. An actor's questions about lanes are the
points where it may be interrupted (reexecute.py); at a wait of a poll it may be left asleep for as
long as one likes. `Bounds` says what a schedule may hold besides: how often an actor is interrupted
between two waits, dies after a publish (its successor starts at once), loses an answer or a request
to publish, wakes although nothing has moved. A state is the hub, where every actor stands and what
is left of the bounds; one that was seen with no less left is not searched again (states are told
apart by 64-bit hashes).

What is left out because it comes to the same: an interruption before a read or write of bytes,
which are named by their digest; the other one of two mergers that have not begun; an order of
wakings when nobody has anything to do, where time passes until the one wakes whose clock is behind.
A death between two publishes is no case of its own: what an actor read dies with it, so it is one
after its last publish. Likewise a publish that lands after its sender died is a sender interrupted
before it that dies after it.

Not covered: more actors or generations, compaction, rollbacks, late contributions, logs pushed
alone, two processes under one number, heads that lag, damaged files. Chaos covers those, at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from diffurefill.fleet.merger import Merger
from diffurefill.fleet.run import Run
from diffurefill.fleet.simulate.kernel import Body
from diffurefill.fleet.simulate.moments import (
    SLEEP_SECONDS,
    Left,
    Moment,
    Move,
    Truth,
    branched,
    covers,
    has_news,
    look,
    sleeps,
)
from diffurefill.fleet.simulate.provenance import ExactAverager, ExactLearner
from diffurefill.fleet.simulate.reexecute import Answer, Ask, Cast, Oracle, Place
from diffurefill.fleet.simulate.scenario import FLEET, World
from diffurefill.fleet.worker import Worker
from diffurefill.store.base import MAIN, Conflict, NotFound, Unknown, Version

SMALL = replace(
    FLEET,
    local_steps=1,
    grace_seconds=0.0,
    poll_seconds=SLEEP_SECONDS,
    live_seconds=0.5 * SLEEP_SECONDS,
    lease_seconds=0.5 * SLEEP_SECONDS,
    log_seconds=1e9,
    guard_rows=0,
)
"""Times so short that what a merger sees at one look is all it waits for, and that a standby which
sees the same head twice may claim: every verdict of "dead" is given too early in some schedule."""

MERGERS = ("m0", "m1")
WORKERS = ("w0", "w1")
SLOTS = (*MERGERS, *WORKERS)
MAX_DEPTH = 400
"""Questions in one schedule: a fleet that asks more makes no progress."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one schedule may hold at most."""

    generations: int = 3
    preemptions: int = 0
    """Times that an actor is interrupted between two of its waits."""
    crashes: int = 0
    lost: int = 0
    """Publishes without an answer, landed or not."""
    idle: int = 0
    """Wakings of an actor for which nothing has moved, while another one has something to do."""

    @property
    def left(self) -> Left:
        return (self.preemptions, self.crashes, self.lost, self.idle)


@dataclass
class Outcome:
    """What a search came to. `violations` is empty for a sound protocol."""

    bounds: Bounds
    schedules: int = 0
    """Paths followed, to the last generation or to a state seen before."""
    completed: int = 0
    """Of them, those that reached the last generation."""
    states: int = 0
    transitions: int = 0
    places: int = 0
    """Different positions of single actors, each reached by running the product's code."""
    longest: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    """The steps to the first violation."""
    is_whole: bool = True
    """Whether everything within the bounds was searched."""


def search(bounds: Bounds, folder: Path, max_states: int | None = None) -> Outcome:
    """Search until done, until a violation, or for `max_states` states."""
    return _Search(bounds, folder).run(max_states)


class _Search:
    def __init__(self, bounds: Bounds, folder: Path) -> None:
        self._bounds, self._outcome = bounds, Outcome(bounds)
        world = World(0, folder / "world", SMALL)
        self._config = world.config
        self._cast = Cast(self._open, world.hub.blobs, folder / "cast")
        self._numbers: dict[object, int] = {}
        self._seen: dict[int, tuple[Left, ...]] = {}
        self._truths: dict[object, Truth] = {}
        self._first = self._cast_first(world)

    def _open(self, oracle: Oracle, disk: Path) -> Run:
        return Run(oracle, self._config, disk, "{}")

    def _cast_first(self, world: World) -> Moment:
        launches = (1,) * len(SLOTS)
        self._roots: dict[str, Place] = {}
        places = tuple(self._root(slot, 1) for slot in range(len(SLOTS)))
        head = world.hub.head(MAIN)
        assert head is not None
        truth = self._truth(Truth(world.hub, world.ledger, {MAIN: (self._number(head),)}))
        return Moment(truth, places, launches, None, self._bounds.left)

    def _truth(self, truth: Truth) -> Truth:
        """The one that equals it: leftovers alone depend on more than each lane's own history."""
        key = (tuple(sorted(truth.lanes.items())), frozenset(truth.ledger.leftovers))
        return self._truths.setdefault(key, truth)

    # --- actors ----------------------------------------------------------------------------------

    def _root(self, slot: int, launch: int) -> Place:
        name = f"{SLOTS[slot]}#{launch}"
        if name not in self._roots:
            self._roots[name] = self._cast.place(name, self._start)
        return self._roots[name]

    def _start(self, run: Run, place: Place) -> Body:
        kind, number = place.name[0], int(place.name[1])

        def clock() -> float:
            return place.clock

        def new_id() -> str:
            return place.name

        if kind == "m":
            merger = Merger(run, ExactAverager(), clock=clock, report=_silent, new_id=new_id)
            return merger.run(self._bounds.generations)
        learner = ExactLearner(
            number, place.name, on_adopt=lambda *facts: place.adopted.append(facts)
        )
        return Worker(
            run, number, learner, clock=clock, wall_clock=clock, report=_silent, new_id=new_id
        ).run()

    def _number(self, version: Version) -> int:
        """Equal versions of different schedules have one number."""
        files = tuple(sorted((path, ref.sha256) for path, ref in version.files.items()))
        key = (version.lane, version.id, version.nonce, files)
        return self._numbers.setdefault(key, len(self._numbers))

    # --- the search ------------------------------------------------------------------------------

    def run(self, max_states: int | None) -> Outcome:
        outcome, stack = self._outcome, [(self._first, self._moves(self._first))]
        self._is_new(self._first)
        while stack:
            if max_states is not None and outcome.states >= max_states:
                outcome.is_whole = False
                break
            moment, moves = stack[-1]
            move = next(moves, None)
            if move is None:
                stack.pop()
                continue
            after = self._after(moment, move)
            outcome.transitions += 1
            outcome.longest = max(outcome.longest, after.depth)
            if after.truth.ledger.violations or after.depth > MAX_DEPTH:
                self._tell(after)
                break
            if not self._is_new(after):
                outcome.schedules += 1
                continue
            following = self._moves(after)
            stack.append((after, following))
            if self._is_over(after):
                outcome.schedules += 1
                outcome.completed += 1
        outcome.places = self._cast.num_places
        return outcome

    def _is_new(self, moment: Moment) -> bool:
        """Whether nothing like it was seen with as much left."""
        standing = tuple(id(place) for place in moment.places)
        key = hash((id(moment.truth), standing, moment.current))
        left, lefts = moment.left, self._seen.get(key, ())
        if any(map(left.__eq__, lefts)) or any(covers(other, left) for other in lefts):
            return False
        self._seen[key] = (*(other for other in lefts if not covers(left, other)), left)
        self._outcome.states += 1
        return True

    def _is_over(self, moment: Moment) -> bool:
        return not self._able(moment)

    def _able(self, moment: Moment) -> list[int]:
        """Who has something left to do; workers stop with the last generation."""
        over = moment.truth.ledger.state["gen"] >= self._bounds.generations
        able = [
            slot
            for slot, place in enumerate(moment.places)
            if place.ask is not None and not (over and SLOTS[slot] in WORKERS)
        ]
        fresh = [s for s in able if SLOTS[s] in MERGERS and not moment.places[s].answers]
        return [slot for slot in able if slot not in fresh[1:]]  # they differ in their names only

    def _moves(self, moment: Moment) -> Iterator[Move]:
        able = self._able(moment)
        ready = [
            s
            for s in able
            if not sleeps(moment.places[s]) or has_news(moment.truth, moment.places[s])
        ]
        if not ready:  # time passes for all: the one wakes whose clock is behind
            if able:
                slot = min(able, key=lambda s: (moment.places[s].clock, s))
                yield from self._fates(moment, slot, moment.left)
            return
        preemptions, crashes, lost, idle = moment.left
        for slot in sorted(able, key=lambda s: (s != moment.current, s)):
            interrupts = moment.current is not None and slot != moment.current
            wakes = slot not in ready
            if (interrupts and not preemptions) or (wakes and not idle):
                continue
            left = (preemptions - interrupts, crashes, lost, idle - wakes)
            yield from self._fates(moment, slot, left)

    def _fates(self, moment: Moment, slot: int, left: Left) -> Iterator[Move]:
        yield Move(slot, "", left)
        ask = moment.places[slot].ask
        if ask is None or ask.op != "publish":
            return
        preemptions, crashes, lost, idle = left
        if crashes:
            yield Move(slot, "dies", (preemptions, crashes - 1, lost, idle))
        if lost:
            for fate in ("lost answer", "lost request"):
                yield Move(slot, fate, (preemptions, crashes, lost - 1, idle))

    # --- one move --------------------------------------------------------------------------------

    def _after(self, moment: Moment, move: Move) -> Moment:
        place, fate = moment.places[move.slot], move.fate
        assert place.ask is not None
        self._outcome.fates[fate or place.ask.op] += 1
        truth = moment.truth
        if place.ask.op == "publish" and fate != "lost request":
            truth, key, answer = self._publish(truth, place, place.ask)
        else:
            key, answer = look(truth, place.ask)
        if fate.startswith("lost"):
            key, answer = "lost", Unknown("no answer came")
        launches = list(moment.launches)
        if fate == "dies":
            launches[move.slot] += 1
            there = self._root(move.slot, launches[move.slot])
        else:
            there = self._cast.step(place, self._start, key, answer)
        places = list(moment.places)
        places[move.slot] = there
        goes_on = fate != "dies" and there.ask is not None and not sleeps(there)
        after = Moment(
            truth,
            tuple(places),
            tuple(launches),
            move.slot if goes_on else None,
            move.left,
            moment.depth + 1,
            (moment, _told(place, fate)),
        )
        if fate != "dies":
            _check_place(after, there)
        return after

    def _publish(self, truth: Truth, place: Place, ask: Ask) -> tuple[Truth, object, Answer]:
        """What the hub is after this publish, and what it answers."""
        if id(place) not in truth.after:
            truth.after[id(place)] = self._published(truth, place, ask)
        return truth.after[id(place)]

    def _published(self, truth: Truth, place: Place, ask: Ask) -> tuple[Truth, object, Answer]:
        (lane,) = ask.lanes
        hub, ledger = branched(truth.hub, truth.ledger)
        hub.fetched_by = {place.name: set(place.fetched)}
        try:
            version = hub.publish(
                lane, ask.changes, expect=ask.expect, nonce=ask.nonce, writer=place.name
            )
        except (Conflict, NotFound) as error:
            return truth, (type(error).__name__, str(error)), error
        number = self._number(version)
        lanes = {**truth.lanes, lane: (*truth.lanes.get(lane, ()), number)}
        return self._truth(Truth(hub, ledger, lanes)), number, version

    def _tell(self, moment: Moment) -> None:
        outcome = self._outcome
        outcome.violations = moment.truth.ledger.violations or [
            f"I20: no generation {self._bounds.generations} after {moment.depth} questions"
        ]
        step = moment.before
        while step is not None:
            moment, told = step
            outcome.schedule.insert(0, told)
            step = moment.before
        outcome.is_whole = False


def _check_place(moment: Moment, place: Place) -> None:
    """What an actor did since its last question: adoptions, and whether it ended as it may."""
    for facts in place.adopted:
        moment.truth.ledger.adopted(*facts)
    if place.ask is None and place.ending != "done":
        moment.truth.ledger.check("I20", False, f"{place.name} ended: {place.ending}")


def _told(place: Place, fate: str) -> str:
    assert place.ask is not None
    return " ".join([place.name, place.ask.op, *place.ask.lanes, fate]).strip()


def _silent(line: str) -> None:
    pass
