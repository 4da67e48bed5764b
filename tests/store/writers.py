"""Writers that run as processes of their own: `python -m tests.store.writers URI NAME COUNT`.

Each increments the file `counter` of lane `race` COUNT times and notes itself in `by/NAME`.
COUNT 0 writes until it is killed.
"""

import itertools
import sys

from diffurefill.store.base import Conflict, Store, Version, open_store, publish_surely

LANE = "race"


def count(store: Store) -> int:
    """The counter at the head of the lane; 0 before the first increment."""
    head = store.head(LANE)
    return int(store.read(head.ref("counter"))) if head else 0


def increment(store: Store, name: str) -> None:
    """Read, add one, publish; start again from the new head whenever another was faster."""
    while True:
        head = store.head(LANE)
        value = int(store.read(head.ref("counter"))) if head else 0
        changes = {"counter": b"%d" % (value + 1), f"by/{name}": name.encode()}
        try:
            publish_surely(store, LANE, changes, expect=head)
            return
        except Conflict:
            continue


def publish_times(store: Store, times: int) -> list[Version]:
    """So many versions of the main lane, whose file `state` counts them."""
    versions: list[Version] = []
    for number in range(1, times + 1):
        expect = versions[-1] if versions else None
        versions.append(store.publish("main", {"state": b"%d" % number}, expect=expect))
    return versions


def main(uri: str, name: str, times: str) -> None:
    store = open_store(uri)
    print("ready", flush=True)
    for _ in range(int(times)) if int(times) else itertools.count():
        increment(store, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
