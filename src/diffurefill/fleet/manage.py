"""What a person does to a run: return to an earlier generation, give back the store's room.

Both are publishes on the main lane like any other, by compare-and-swap, so they may be asked for
while the fleet works: a merger in its round is fenced, stands by and goes on from what was
published here. Workers need not be told. Source: spec fleet.md 5.2 (4).
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid

from diffurefill.config import UserError
from diffurefill.copies import local_copies
from diffurefill.fleet import protocol
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import State
from diffurefill.fleet.rollback import (
    MAX_OVERTAKEN,
    Report,
    T,
    Waiting,
    publish_state,
    rolling_back,
)
from diffurefill.fleet.run import read_state
from diffurefill.fleet.term import with_state
from diffurefill.store.base import (
    MAIN,
    Conflict,
    NoRun,
    Store,
    StoreError,
    Version,
    compact_surely,
    open_store,
    publish_surely,
)


def rollback(uri: str, to: int | None = None, report: Report = print) -> State:
    """Publish generation `to` of the run at `uri` again, as a new one; returns its state.

    None: the generation before the newest, or the newest readable one where the newest version
    cannot be read. UserError when there is no such generation or its weights are gone.
    """
    from diffurefill.fleet.averaging import FileAverager

    with local_copies() as cache:
        store, apply = open_store(uri), FileAverager().apply_update
        return _finish(rolling_back(store, cache, to, report, apply))


def compact(uri: str, report: Report = print) -> State:
    """Give back the room of what only older versions of the run at `uri` need."""
    return _finish(compacting(open_store(uri), report))


def _finish(task: Waiting[T]) -> T:
    """Run it in real time."""
    while True:
        try:
            seconds = next(task)
        except StopIteration as done:
            return done.value
        try:
            time.sleep(seconds)
        except KeyboardInterrupt as interrupt:
            task.throw(interrupt)  # it may have something to give up
            raise


def compacting(store: Store, report: Report) -> Waiting[State]:
    """In a term of its own, so that no merger publishes between the record and the deletion."""
    io = Patience(report, random.Random())
    yield from io(store.check_access)
    version, state = yield from _claim(store, io, report)
    try:
        marked = protocol.compacted(state)
        version = yield from publish_state(store, io, version, marked, {})
        kept, state = version, marked
        version = yield from io(lambda: compact_surely(store, MAIN, kept))
        state = protocol.released(state)
        yield from publish_state(store, io, version, state, {})
    except Conflict:
        raise UserError(
            "a merger took the run over meanwhile; nothing is lost, try again"
        ) from None
    except (Exception, KeyboardInterrupt):  # the merger need not wait for this term to run out
        _give_up(store, version, state)
        raise
    report(f"older versions than generation {state.gen} have been given up; merging goes on")
    return state


def _give_up(store: Store, version: Version, state: State) -> None:
    changes = with_state(protocol.released(state), {})
    with contextlib.suppress(StoreError, OSError):
        publish_surely(store, MAIN, changes, expect=version)


def _claim(store: Store, io: Patience, report: Report) -> Waiting[tuple[Version, State]]:
    for _ in range(MAX_OVERTAKEN):
        version = yield from io(store.head)
        if version is None:
            raise NoRun(store.uri)
        head = version
        before = yield from io(lambda head=head: read_state(store, head))
        state = protocol.claimed(before, uuid.uuid4().hex)
        try:
            return (yield from publish_state(store, io, version, state, {})), state
        except Conflict:
            report("the merger published meanwhile; trying again")
    raise UserError(f"the merger published {MAX_OVERTAKEN} times meanwhile; stop it and try again")
