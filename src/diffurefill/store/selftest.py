"""Proof by trial that a store honours conditional writes. Many S3 look-alikes silently do not.

Source: spec hub.md C1 (of seven servers tried, four ignored the condition and lost updates).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from diffurefill.store.base import (
    Busy,
    Conflict,
    Ref,
    Store,
    UnsafeStore,
    Version,
    publish_surely,
)


def prove_conditional_writes(
    store: Store, lane: str, *, num_writers: int = 4, updates: int = 3
) -> None:
    """Create twice, update from a stale version, race; raises UnsafeStore. `lane` must be new.

    `num_writers` threads publish `updates` times each: fewer where every publish costs quota.
    """
    first = publish_surely(store, lane, {"origin": b"self-test\n"}, expect=None)
    _must_conflict(lambda: store.publish(lane, {}, expect=None), "created a lane twice")
    second = publish_surely(store, lane, {}, expect=first)
    _must_conflict(lambda: store.publish(lane, {}, expect=first), "took a stale update")
    names = [[f"{writer}-{update}" for update in range(updates)] for writer in range(num_writers)]
    _race(store, lane, second, names)


def _must_conflict(publish: Callable[[], Version], fault: str) -> None:
    try:
        publish()
    except Conflict:
        return
    raise _unsafe(fault)


def _race(store: Store, lane: str, start: Version, names: list[list[str]]) -> None:
    """Each writer adds paths of its own, so a lost update is a path that is missing at the end."""
    content = start.ref("origin")
    paths = [path for row in names for path in row]

    def write(row: list[str]) -> None:
        for path in row:
            _add(store, lane, path, content, attempts=2 * len(paths))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(write, names))
    head = store.head(lane)
    missing = set(paths) - set(head.files if head else ())
    if missing:
        raise _unsafe(f"lost {len(missing)} of {len(paths)} racing updates")


def _add(store: Store, lane: str, path: str, content: Ref, attempts: int) -> None:
    # Every honest Conflict means that another writer got on, so half of these are enough; the
    # rest are for a store that asks to slow down.
    for _attempt in range(attempts):
        head = store.head(lane)
        try:
            publish_surely(store, lane, {path: content}, expect=head)
            return
        except Conflict:
            continue
        except Busy as busy:
            time.sleep(busy.retry_after)
    raise _unsafe("reported conflicts although nobody else had written")


def _unsafe(fault: str) -> UnsafeStore:
    return UnsafeStore(
        f"this store {fault}: two mergers would overwrite each other; keep the run elsewhere"
    )
