"""The simulated hub keeps the Store contract; so does a process's connection while all is well."""

from pathlib import Path

import pytest

from diffurefill.fleet.simulate.connection import SimStore
from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.kernel import Costs, Kernel
from diffurefill.fleet.simulate.scenario import NoFaults
from diffurefill.store.base import Busy, NotFound, Store
from tests.store import test_contract

PROCESSES = ("racing_processes", "killed_writers")
"""Tests that open the store from other processes: a hub in memory has none."""

for name, test in vars(test_contract).items():
    if name.startswith("test_") and not any(part in name for part in PROCESSES):
        globals()[name] = test


@pytest.fixture(params=["hub", "connection"])
def store(request: pytest.FixtureRequest) -> Store:
    hub, kernel = SimHub(), Kernel(0)
    process = kernel.launch("tester", lambda process: iter(()))
    return hub if request.param == "hub" else SimStore(hub, process, NoFaults(), Costs())


def test_the_quota_lets_so_many_commits_through_in_an_hour() -> None:
    now = [0.0]
    hub = SimHub(lambda: now[0], commits_per_hour=2)
    first = hub.publish("main", {"a": b"1"}, expect=None)
    now[0] = 600.0
    second = hub.publish("main", {"a": b"2"}, expect=first)
    with pytest.raises(Busy) as busy:
        hub.publish("main", {"a": b"3"}, expect=second)
    assert busy.value.retry_after == 3000.0
    assert hub.head("main") == second
    now[0] = 3600.0
    hub.publish("main", {"a": b"3"}, expect=second)


def test_a_squash_takes_every_older_id_and_its_bytes(tmp_path: Path) -> None:
    hub = SimHub()
    first = hub.publish("main", {"a": b"1", "kept": b"k"}, expect=None)
    other = hub.publish("w-00", {"b": b"2"}, expect=None)
    second = hub.publish("main", {"a": b"3"}, expect=first)
    (tmp_path / "staged").write_bytes(b"for later")
    staged = hub.stage(tmp_path / "staged")
    squashed = hub.compact("main", second)
    assert (squashed.nonce, squashed.files) == (second.nonce, second.files)
    assert squashed.id not in (first.id, second.id)
    assert list(hub.history("main")) == [squashed]
    with pytest.raises(NotFound):
        hub.read(first.ref("a"))
    assert hub.read(squashed.ref("kept")) == b"k"
    assert hub.read(other.ref("b")) == b"2"
    assert hub.read(staged) == b"for later"
