"""Proof by trial that a store honours conditional writes. Many S3 look-alikes silently do not.

Source: spec hub.md C1 (of seven servers tried, four ignored the condition and lost updates).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from diffurefill.store.base import Conflict, Ref, Store, UnsafeStore, Version

NUM_WRITERS = 4
UPDATES_PER_WRITER = 3


def prove_conditional_writes(store: Store, lane: str) -> None:
    """Create twice, update from a stale version, race; raises UnsafeStore. `lane` must be new."""
    first = store.publish(lane, {"origin": b"self-test\n"}, expect=None)
    _must_conflict(lambda: store.publish(lane, {}, expect=None), "created a lane twice")
    second = store.publish(lane, {}, expect=first)
    _must_conflict(lambda: store.publish(lane, {}, expect=first), "took a stale update")
    _race(store, lane, second)


def _must_conflict(publish: Callable[[], Version], fault: str) -> None:
    try:
        publish()
    except Conflict:
        return
    raise _unsafe(fault)


def _race(store: Store, lane: str, start: Version) -> None:
    """Each writer adds paths of its own, so a lost update is a path that is missing at the end."""
    names = [[f"{w}-{u}" for u in range(UPDATES_PER_WRITER)] for w in range(NUM_WRITERS)]
    content = start.ref("origin")

    def write(paths: list[str]) -> None:
        for path in paths:
            _add(store, lane, path, content)

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(write, names))
    head = store.head(lane)
    missing = {name for row in names for name in row} - set(head.files if head else ())
    if missing:
        raise _unsafe(f"lost {len(missing)} of {NUM_WRITERS * UPDATES_PER_WRITER} racing updates")


def _add(store: Store, lane: str, path: str, content: Ref) -> None:
    # Every honest Conflict means that another writer got on, so this many attempts are enough.
    for _attempt in range(NUM_WRITERS * UPDATES_PER_WRITER):
        head = store.head(lane)
        try:
            store.publish(lane, {path: content}, expect=head)
            return
        except Conflict:
            continue
    raise _unsafe("reported conflicts although nobody else had written")


def _unsafe(fault: str) -> UnsafeStore:
    return UnsafeStore(
        f"this store {fault}: two mergers would overwrite each other; keep the run elsewhere"
    )
