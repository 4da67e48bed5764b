"""What every store promises of compaction and of the access check (base.py)."""

from pathlib import Path

import pytest

from diffurefill.store.base import Conflict, NotFound, Ref, Store
from diffurefill.store.hub import HubStore
from tests.store.memory import MemoryStore


def without_age_guard(store: Store) -> bool:
    """Whether compaction now frees at once. Where it cannot be switched off, nothing is sure."""
    if hasattr(store, "grace_seconds"):
        store.grace_seconds = 0.0
        return True
    return isinstance(store, MemoryStore | HubStore)


def is_readable(store: Store, ref: Ref) -> bool:
    try:
        return len(store.read(ref)) == ref.size
    except NotFound:
        return False


def test_compaction_keeps_the_head_and_frees_what_only_older_versions_need(store: Store) -> None:
    frees = without_age_guard(store)
    first = store.publish("main", {"state": b"1", "kept": b"kept"}, expect=None)
    second = store.publish("main", {"state": b"2"}, expect=first)
    third = store.publish("main", {"state": b"3"}, expect=second)
    head = store.compact("main", third)
    assert (head.nonce, dict(head.files)) == (third.nonce, dict(third.files))
    assert store.head("main") == head
    assert {path: store.read(ref) for path, ref in head.files.items()} == {
        "state": b"3", "kept": b"kept",
    }  # fmt: skip
    if frees:
        assert not is_readable(store, first.ref("state"))
        assert not is_readable(store, second.ref("state"))
    fourth = store.publish("main", {"state": b"4"}, expect=head)
    assert store.head("main") == fourth
    assert store.read(fourth.ref("kept")) == b"kept"


def test_compaction_again_frees_what_has_been_replaced_since(store: Store) -> None:
    frees = without_age_guard(store)
    first = store.publish("main", {"state": b"1"}, expect=None)
    second = store.publish("main", {"state": b"2"}, expect=store.compact("main", first))
    third = store.publish("main", {"state": b"3"}, expect=store.compact("main", second))
    head = store.compact("main", third)
    assert store.read(head.ref("state")) == b"3"
    if frees:
        assert not is_readable(store, second.ref("state"))


def test_compaction_spares_what_the_head_of_another_lane_names(store: Store) -> None:
    frees = without_age_guard(store)
    first = store.publish("main", {"state": b"shared"}, expect=None)
    worker = store.publish("w-00", {"copy": b"shared"}, expect=None)
    second = store.publish("main", {"state": b"2"}, expect=first)
    store.compact("main", second)
    assert store.read(worker.ref("copy")) == b"shared"
    # Once that lane lets go of it as well, the next compaction of either one may free it.
    moved = store.publish("w-00", {"copy": b"own"}, expect=worker)
    store.compact("w-00", moved)
    if frees:
        assert not is_readable(store, worker.ref("copy"))


def test_compaction_of_a_stale_version_conflicts_and_frees_nothing(store: Store) -> None:
    without_age_guard(store)
    first = store.publish("main", {"state": b"1"}, expect=None)
    second = store.publish("main", {"state": b"2"}, expect=first)
    third = store.publish("main", {"state": b"3"}, expect=second)
    with pytest.raises(Conflict):
        store.compact("main", second)
    assert store.head("main") == third
    assert is_readable(store, third.ref("state"))


def test_a_staged_file_survives_a_compaction_and_can_be_published(
    store: Store, tmp_path: Path
) -> None:
    """Also when its bytes are those of an older version: what was staged lately is young."""
    source = tmp_path / "weights"
    source.write_bytes(b"1")
    first = store.publish("main", {"state": b"1"}, expect=None)
    second = store.publish("main", {"state": b"2"}, expect=first)
    if isinstance(store, MemoryStore):
        source.write_bytes(b"not yet published")
    ref = store.stage(source)
    head = store.compact("main", second)
    third = store.publish("main", {"weights": ref}, expect=head)
    assert store.read(third.ref("weights")) == source.read_bytes()


def test_a_store_that_can_be_written_passes_the_access_check_and_shows_nothing(
    store: Store,
) -> None:
    store.check_access()
    assert store.lanes() == []
