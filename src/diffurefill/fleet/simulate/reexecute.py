"""An actor as a deterministic automaton: what it asks of the hub next, given the answers so far.

A generator cannot be copied, so an actor is run again from its beginning with the answers it got,
until it asks for something that has no answer yet. Every place it ever stood in is remembered: the
product's code runs once for each sequence of answers, however many schedules lead there.

Only questions about lanes are asked. Bytes are named by their digest, so reading and staging them
commutes with whatever anybody else does, and happens at once.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffurefill.config import UserError
from diffurefill.fleet.run import Run
from diffurefill.fleet.simulate.kernel import Body
from diffurefill.store import base
from diffurefill.store.base import MAIN, Change, Ref, StoreError, Version, sha256_file

Answer = Any
"""What a store operation returned; a StoreError for one that it raised."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A store operation that an actor is about to make."""

    op: str
    lanes: tuple[str, ...] = ()
    """The lanes it reads or writes; none for `lanes`, which depends on all of them."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    expect: Version | None = None
    nonce: str = ""


class Suspended(BaseException):
    """The actor asks something that has no answer yet. Nothing in the product may catch it."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask.op)
        self.ask = ask


@dataclass(eq=False)
class Place:
    """Where one launch of an actor stands. `ask` is None when it has ended, by `ending`."""

    name: str
    answers: tuple[Answer, ...]
    ask: Ask | None = None
    ending: str = ""
    bug: bool = False
    """It ended with an exception that no process may end with."""
    clock: float = 0.0
    """Seconds it has waited since its start."""
    waited: float = 0.0
    """Of them, since its last question."""
    adopted: list[tuple[Any, ...]] = field(default_factory=list)
    """What its learner adopted since its last question (provenance.ExactLearner.on_adopt)."""
    fetched: frozenset[str] = frozenset()
    """Digests of the files that it downloaded, ever."""
    seen: Mapping[str, str | None] = field(default_factory=dict)
    """Lane -> head id, as it saw it last."""
    after: dict[Any, Place] = field(default_factory=dict)
    """By the answer's key, where it stood next."""


class Oracle:
    """The Store contract, answered from a list as far as it goes."""

    uri = "memory:"

    def __init__(self, blobs: dict[str, bytes], place: Place) -> None:
        self._blobs, self._place, self._left = blobs, place, list(place.answers)
        self._fetched: set[str] = set()

    def _answer(self, ask: Ask) -> Any:
        if not self._left:
            self._place.fetched = frozenset(self._fetched)
            raise Suspended(ask)
        self._place.waited = 0.0
        self._place.adopted.clear()
        answer = self._left.pop(0)
        if isinstance(answer, StoreError):
            raise answer.with_traceback(None)
        return answer

    def selftest(self) -> None:
        pass

    check_access = selftest

    def lanes(self) -> list[str]:
        return list(self._answer(Ask(op="lanes")))

    def head(self, lane: str = MAIN) -> Version | None:
        return self._answer(Ask(op="head", lanes=(lane,)))

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        return dict(self._answer(Ask(op="poll", lanes=tuple(lanes))))

    def lookup(self, lane: str, nonce: str) -> Version | None:
        return self._answer(Ask(op="lookup", lanes=(lane,), nonce=nonce))

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
    ) -> Version:
        nonce = nonce or base.new_nonce()
        ask = Ask(op="publish", lanes=(lane,), changes=changes, expect=expect, nonce=nonce)
        return self._answer(ask)

    def history(self, lane: str) -> Iterator[Version]:
        raise NotImplementedError("no actor of a round reads a lane's history")

    def compact(self, lane: str, expect: Version) -> Version:
        raise NotImplementedError("compaction is not searched")

    # --- bytes -----------------------------------------------------------------------------------

    def stage(self, source: Path) -> Ref:
        ref = sha256_file(source)
        self._blobs[ref.sha256] = source.read_bytes()
        return ref

    def read(self, ref: Ref) -> bytes:
        return self._blobs[ref.sha256]

    def fetch(self, ref: Ref, dest: Path) -> Path:
        self._fetched.add(ref.sha256)
        dest.write_bytes(self._blobs[ref.sha256])
        return dest


Start = Callable[[Run, Place], Body]
"""(run, place): an actor of launch `place.name`, whose clock is `place.clock`."""


@dataclass(eq=False)
class Cast:
    """Every launch there may be, and every place that one was ever seen in."""

    make_run: Callable[[Oracle, Path], Run]
    blobs: dict[str, bytes]
    folder: Path
    num_executions: int = 0
    num_places: int = 0

    def place(self, name: str, start: Start, answers: Sequence[Answer] = ()) -> Place:
        """Run a launch up to the first question that `answers` do not settle."""
        place = Place(name, tuple(answers))
        self.num_executions += 1
        self.num_places += 1
        disk = self.folder / "disk"
        disk.mkdir(parents=True)
        try:
            run = self.make_run(Oracle(self.blobs, place), disk)
            with same_nonces(name):
                for seconds in start(run, place):
                    place.clock += seconds
                    place.waited += seconds
            place.ending = "done"
        except Suspended as suspended:
            place.ask = suspended.ask
        except (UserError, StoreError) as error:
            place.ending = f"{type(error).__name__}: {error}"
        except Exception as error:  # a bug of the product, which must not end the search
            place.ending, place.bug = f"{type(error).__name__}: {error}", True
        finally:
            shutil.rmtree(disk)
        return place

    def step(self, place: Place, start: Start, key: Any, answer: Answer) -> Place:
        """Where `place` goes when its question is answered; equal keys mean equal answers."""
        if key not in place.after:
            there = self.place(place.name, start, (*place.answers, answer))
            there.seen = {**place.seen, **_seen(answer)}
            place.after[key] = there
        return place.after[key]


def _seen(answer: Answer) -> dict[str, str | None]:
    if isinstance(answer, dict):
        return answer
    return {answer.lane: answer.id} if isinstance(answer, Version) else {}


@contextlib.contextmanager
def same_nonces(name: str) -> Generator[None]:
    """Publications draw their nonces from here, so that running again asks the same."""
    drawn, real = iter(range(1_000_000)), base.new_nonce
    base.new_nonce = lambda: f"{name}.{next(drawn)}"
    try:
        yield
    finally:
        base.new_nonce = real
