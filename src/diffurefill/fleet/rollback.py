"""Returning a run to an earlier generation: its weights and position become a new generation.

The number is new, so whatever was made on the old one, or is being uploaded to it, is stale even
where the weights are the same bytes (the report's rule iii). Works on a run whose newest state is
damaged: what older versions and the round records tell is enough. Source: spec fleet.md 5.2 (4).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from diffurefill.config import UserError
from diffurefill.fleet import protocol, records
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Average, Saved, State
from diffurefill.fleet.run import ApplyUpdate, Run, Snapshot, read_config, read_state
from diffurefill.store.base import (
    MAIN,
    Change,
    Conflict,
    Corrupt,
    NoRun,
    NotFound,
    Publication,
    Ref,
    Store,
    Version,
    dump_json,
    read_json,
)

Report = Callable[[str], None]
T = TypeVar("T")
Waiting = Generator[float, None, T]
"""Yields seconds to wait before it returns; see worker.py."""

MAX_OVERTAKEN = 8
"""Publishes in a row that a busy merger came first with, before a person is told."""


@dataclass(frozen=True)
class _Past:
    """The run as its newest version tells it."""

    head: Version
    newest: State
    """The newest that can be read, numbered so that what follows it exceeds all that cannot."""
    head_is_readable: bool


@dataclass(frozen=True)
class _Target:
    state: State
    version: Version | None
    """Where it was found; None when only its round record tells of it."""


def rolling_back(
    store: Store,
    cache: Path,
    to: int | None,
    report: Report,
    apply_update: ApplyUpdate,
    jitter: random.Random | None = None,
) -> Waiting[State]:
    """See manage.rollback. `cache` is a folder of its own for copies of weights."""
    io = Patience(report, jitter or random.Random())
    yield from io(store.check_access)
    past = yield from _look_back(store, io)
    if to is None:
        to = yield from _default_target(store, io, past)
    head = past.head
    config = yield from io(lambda: read_config(store, head))
    run = Run(store, config, cache, "")
    while True:
        target = yield from _find(store, io, past, to)
        wanted = yield from _prepared(run, io, past, target, report, apply_update)
        try:
            state = yield from _republish(store, io, wanted, report)
        except NotFound:  # a compaction came between the copies and the publish
            past = yield from _look_back(store, io)
            continue
        report(
            f"generation {state.gen} restores generation {to}: step {state.step}, "
            f"{state.tokens:,} tokens; what was made on others will be refused"
        )
        return state


def _republish(store: Store, io: Patience, wanted: State, report: Report) -> Waiting[State]:
    """The compare-and-swap, and nothing slow: a live merger publishes every minute or two."""
    for _ in range(MAX_OVERTAKEN):
        past = yield from _look_back(store, io)
        state, files = _restored(past, wanted)
        try:
            yield from publish_state(store, io, past.head, state, files)
            return state
        except Conflict:
            report("the merger published meanwhile; trying again")
    raise UserError(f"the merger published {MAX_OVERTAKEN} times meanwhile; stop it and try again")


# --- what there is -------------------------------------------------------------------------------


def _look_back(store: Store, io: Patience) -> Waiting[_Past]:
    def look() -> tuple[Version, State]:  # as one, so that a head that lags is asked for again
        head = _head(store)
        return head, read_state(store, head)

    try:
        head, state = yield from io(look)
        return _Past(head, state, head_is_readable=True)
    except Corrupt:
        head = yield from io(lambda: _head(store))
        newest = yield from _newest_readable(store, io, head)
        return _Past(head, newest, head_is_readable=False)


def _head(store: Store) -> Version:
    head = store.head(MAIN)
    if head is None:
        raise NoRun(store.uri)
    return head


def _newest_readable(store: Store, io: Patience, head: Version) -> Waiting[State]:
    """The newest state that an older version or a round record still tells.

    Its numbers are raised to what the unreadable ones may have had: a version raises the epoch by
    one at most, and the round records' names tell the generation.
    """
    versions = yield from io(lambda: list(store.history(MAIN)))
    found, unread = None, 0
    for version in reversed(versions):
        found = yield from _read_quietly(store, io, version)
        if found is not None:
            break
        unread += 1
    gens = _recorded(head)
    for gen in gens:
        if found is not None and found.gen >= gen:
            break
        recorded = yield from _read_record(store, io, head, gen)
        if recorded is not None and found is not None:
            found = replace(recorded, epoch=found.epoch)
        elif recorded is not None:  # nothing tells up to when older files were deleted
            found = replace(recorded, compacted_gen=gen)
    if found is None:
        raise UserError(f"{store.uri}: no state of this run can be read; restore it from a copy")
    return replace(found, gen=max([found.gen, *gens]), epoch=found.epoch + unread)


def _recorded(version: Version) -> list[int]:
    """Generations whose round records lie in `version`, newest first."""
    names = [path for path in version.files if path.startswith(records.ROUNDS)]
    return sorted((int(Path(name).stem) for name in names), reverse=True)


def _read_quietly(store: Store, io: Patience, version: Version) -> Waiting[State | None]:
    """A version's state; None, without asking again, when it is damaged or deleted."""

    def read() -> State | None:
        try:
            return read_state(store, version)
        except Corrupt:
            return None

    return (yield from io(read))


def _read_record(store: Store, io: Patience, head: Version, gen: int) -> Waiting[State | None]:
    def read() -> State | None:
        try:
            record = read_json(store, head, records.round_path(gen))
            return records.state_from_json(record["state"])
        except (Corrupt, NotFound, KeyError, TypeError):
            return None

    return (yield from io(read))


def _default_target(store: Store, io: Patience, past: _Past) -> Waiting[int]:
    """The generation before the newest weights; after a rollback, before those it restored."""
    state: State | None = past.newest
    if not past.head_is_readable:
        gens = [g for g in _recorded(past.head) if g <= past.newest.gen]
        for gen in [*gens, 0]:
            if (yield from _look_for(store, io, past, gen)) is not None:
                return gen
    while state is not None and state.restored_from is not None:
        state = yield from _read_record(store, io, past.head, state.restored_from)
    if state is None or state.parent_gen is None:
        raise UserError("there is no generation before the run's first weights to return to")
    return state.parent_gen


def _find(store: Store, io: Patience, past: _Past, gen: int) -> Waiting[_Target]:
    target = yield from _look_for(store, io, past, gen)
    if target is None:
        raise UserError(
            f"generation {gen} is not in the history of {store.uri}, which goes from 0 to "
            f"{past.newest.gen}{_possible(past)}"
        )
    return target


def _look_for(store: Store, io: Patience, past: _Past, gen: int) -> Waiting[_Target | None]:
    """The last version of generation `gen`, which has its averages; else its round record."""
    if past.head_is_readable and past.newest.gen == gen:
        return _Target(past.newest, past.head)
    versions = yield from io(lambda: list(store.history(MAIN)))
    for version in reversed(versions):
        state = yield from _read_quietly(store, io, version)
        if state is not None and state.gen == gen:
            return _Target(state, version)
        if state is not None and state.gen < gen:
            break
    recorded = yield from _read_record(store, io, past.head, gen)
    return _Target(recorded, None) if recorded is not None else None


def _possible(past: _Past) -> str:
    """What a person can ask for instead."""
    since = past.newest.compacted_gen
    kept = [str(s.gen) for s in past.newest.snapshots if s.gen < since]
    since = f"every generation from {since} on"
    return f"; these can be restored: {', '.join([*kept, since])}"


# --- making the new generation -------------------------------------------------------------------


def _prepared(
    run: Run, io: Patience, past: _Past, target: _Target, report: Report, apply: ApplyUpdate
) -> Waiting[State]:
    """The target with what is still there of it; every file was read whole and is sound."""
    wanted = target.state
    if not (yield from _keep_weights(run, io, target, apply)):
        raise UserError(
            f"the weights of generation {wanted.gen} are gone or damaged{_possible(past)}"
        )
    return replace(
        wanted,
        ema=(yield from _keep_average(run, io, "EMA", wanted.ema, report)),
        swa=(yield from _keep_average(run, io, "SWA", wanted.swa, report)),
        momentum=(yield from _keep_average(run, io, "outer momentum", wanted.momentum, report)),
    )


def _restored(past: _Past, wanted: State) -> tuple[State, dict[str, Change]]:
    """The state of the new generation, and its other files."""
    held, state = past.head.files, protocol.rolled_back(past.newest, wanted)
    paths = {records.snapshot_path(s.gen): s for s in state.snapshots}
    kept = {path: saved for path, saved in paths.items() if held.get(path) == saved.ref}
    state = replace(state, snapshots=tuple(kept.values()))
    files: dict[str, Change] = {
        records.GLOBAL: state.global_weights,
        records.EMA: state.ema.ref if state.ema else None,
        records.SWA: state.swa.ref if state.swa else None,
        records.MOMENTUM: state.momentum.ref if state.momentum else None,
        records.UPDATE: None,
        **{path: None for path in held if path.startswith("snap/") and path not in kept},
    }
    files = {path: change for path, change in files.items() if change or path in held}
    record = records.round_record(state, state.global_weights)
    return state, {**files, records.round_path(state.gen): dump_json(record)}


def _keep_weights(run: Run, io: Patience, target: _Target, apply: ApplyUpdate) -> Waiting[bool]:
    """Make sure that the whole weights are in the store; False when they cannot be had."""
    state, version = target.state, target.version
    if (yield from _keep(run, io, state.global_weights)):
        return True
    if version is None or state.full_gen == state.gen:
        return False
    try:  # only the update was published before the run went on
        path = yield from io(lambda: run.fetch_global(Snapshot(version, state), apply))
    except (NotFound, Corrupt):
        return False
    yield from io(lambda: run.store.stage(path))
    path.unlink()
    return True


A = TypeVar("A", Average, Saved)


def _keep_average(
    run: Run, io: Patience, name: str, found: A | None, report: Report
) -> Waiting[A | None]:
    if found is None or (yield from _keep(run, io, found.ref)):
        return found
    report(f"the {name} of that generation is gone; it starts anew")
    return None


def _keep(run: Run, io: Patience, ref: Ref) -> Waiting[bool]:
    """Read a file whole and put it where a publish finds it."""
    try:
        path = yield from io(lambda: run.fetch(ref))
    except (NotFound, Corrupt):
        return False
    yield from io(lambda: run.store.stage(path))
    path.unlink()
    return True


def publish_state(
    store: Store, io: Patience, head: Version, state: State, changes: dict[str, Change]
) -> Waiting[Version]:
    changes = {**changes, records.STATE: dump_json(records.to_json(state))}
    publication = Publication(store, MAIN, changes, expect=head)
    return (yield from io(publication.attempt))
