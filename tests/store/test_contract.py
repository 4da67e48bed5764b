"""What every store promises (base.py). Run on each backend of the `store` fixture."""

import hashlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.store.base import (
    Conflict,
    NotFound,
    Ref,
    Store,
    Unknown,
    Version,
    new_nonce,
    open_store,
    publish_surely,
    read_json,
)
from tests.store import writers

ROOT = Path(__file__).resolve().parents[2]
LANES = ["main", "w-00", "w-01"]


def start_writer(store: Store, name: str, times: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.store.writers", store.uri, name, str(times)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def ids(store: Store, lane: str) -> list[str]:
    return [version.id for version in store.history(lane)]


def assert_lane_is_whole(store: Store, lane: str) -> None:
    """Every version readable, ids distinct, and the last one is the head."""
    versions = list(store.history(lane))
    assert len({version.id for version in versions}) == len(versions)
    assert versions[-1] == store.head(lane)
    for version in versions:
        for ref in version.files.values():
            assert len(store.read(ref)) == ref.size


# --- versions ---


def test_a_lane_nobody_wrote_has_no_head(store: Store) -> None:
    assert store.head("main") is None
    assert store.lanes() == []
    assert store.poll(["main"]) == {"main": None}
    assert store.lookup("main", "nonce") is None
    assert list(store.history("main")) == []


def test_a_publish_lays_changes_over_the_files_of_the_expected_version(store: Store) -> None:
    first = store.publish("main", {"kept": b"1", "changed": b"1", "gone": b"1"}, expect=None)
    second = store.publish("main", {"changed": b"2", "gone": None, "new": b"2"}, expect=first)
    contents = {path: store.read(ref) for path, ref in second.files.items()}
    assert contents == {"kept": b"1", "changed": b"2", "new": b"2"}
    assert store.head("main") == second


def test_an_old_version_stays_readable(store: Store) -> None:
    first = store.publish("main", {"state.json": b'{"gen": 1}'}, expect=None)
    store.publish("main", {"state.json": b'{"gen": 2}'}, expect=first)
    assert read_json(store, first, "state.json") == {"gen": 1}


def test_history_gives_every_version_oldest_first(store: Store) -> None:
    first = store.publish("main", {"a": b"1"}, expect=None)
    second = store.publish("main", {"a": b"2"}, expect=first)
    assert list(store.history("main")) == [first, second]


def test_an_unchanged_publish_still_makes_a_new_version(store: Store) -> None:
    first = store.publish("main", {"a": b"1"}, expect=None)
    second = store.publish("main", {"a": b"1"}, expect=first)
    assert second.id != first.id
    assert second.nonce != first.nonce


def test_lanes_do_not_disturb_each_other(store: Store) -> None:
    main = store.publish("main", {"a": b"1"}, expect=None)
    worker = store.publish("w-03", {"a": b"2"}, expect=None)
    assert store.lanes() == ["main", "w-03"]
    assert store.poll(["main", "w-03"]) == {"main": main.id, "w-03": worker.id}
    store.publish("main", {"a": b"3"}, expect=main)
    assert store.head("w-03") == worker


@pytest.mark.parametrize("lane", ["", "../main", "a/b", "w_1", "w.1", "-x", "a b", "a\n"])
def test_a_bad_lane_name_is_refused(store: Store, lane: str) -> None:
    with pytest.raises(UserError):
        store.publish(lane, {"a": b"1"}, expect=None)
    with pytest.raises(UserError):
        store.head(lane)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a\\b", "a/"])
def test_a_bad_path_is_refused(store: Store, path: str) -> None:
    with pytest.raises(UserError):
        store.publish("main", {path: b"1"}, expect=None)
    assert store.head("main") is None


# --- the compare-and-swap ---


def test_a_lane_cannot_be_created_twice(store: Store) -> None:
    store.publish("main", {"a": b"1"}, expect=None)
    with pytest.raises(Conflict):
        store.publish("main", {"a": b"2"}, expect=None)


def test_an_update_from_a_stale_version_conflicts_and_changes_nothing(store: Store) -> None:
    first = store.publish("main", {"a": b"1"}, expect=None)
    second = store.publish("main", {"a": b"2"}, expect=first)
    with pytest.raises(Conflict):
        store.publish("main", {"a": b"3"}, expect=first)
    assert store.head("main") == second


def test_an_update_of_a_lane_that_is_empty_conflicts(store: Store) -> None:
    with pytest.raises(Conflict):
        store.publish("main", {"a": b"1"}, expect=Version("main", "1", "n", {}))
    assert store.head("main") is None


def test_a_version_of_another_lineage_is_not_the_head(store: Store) -> None:
    """The number alone is not enough: the lane may have been removed and made again."""
    first = store.publish("main", {"a": b"1"}, expect=None)
    with pytest.raises(Conflict):
        store.publish("main", {"a": b"2"}, expect=Version("main", first.id, "foreign", {}))


OPERATION = st.tuples(
    st.sampled_from(LANES),
    st.dictionaries(st.sampled_from("abc"), st.none() | st.binary(max_size=3), max_size=3),
    st.integers(0, 3),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(operations=st.lists(OPERATION, max_size=8))
def test_any_sequence_of_publishes_agrees_with_a_plain_dictionary(
    store: Store, operations: list[tuple[str, dict[str, bytes | None], int]]
) -> None:
    """The reference: a list of {path: bytes} per lane, extended only from its last entry."""
    example = new_nonce()  # the examples share one store: each has lanes of its own
    reference: dict[str, list[dict[str, bytes]]] = {}
    seen: dict[str, list[Version | None]] = {}
    for lane_kind, changes, age in operations:
        lane = f"{lane_kind}-{example}"
        versions = seen.setdefault(lane, [None])
        expect = versions[-1 - min(age, len(versions) - 1)]
        if expect is not versions[-1]:
            with pytest.raises(Conflict):
                store.publish(lane, changes, expect=expect)
            continue
        versions.append(store.publish(lane, changes, expect=expect))
        contents = reference.setdefault(lane, [])
        merged = {**(contents[-1] if contents else {}), **changes}
        contents.append({path: data for path, data in merged.items() if data is not None})
    for lane, contents in reference.items():
        stored = [
            {path: store.read(ref) for path, ref in version.files.items()}
            for version in store.history(lane)
        ]
        assert stored == contents


def is_remote(store: Store) -> bool:
    """Whether every operation is a request: then a test makes do with fewer."""
    return "://" in store.uri


def test_racing_processes_lose_no_update_and_leave_no_gap(shared_store: Store) -> None:
    num, times = (6, 4) if is_remote(shared_store) else (8, 12)
    processes = [start_writer(shared_store, f"p{i}", times) for i in range(num)]
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0] * num
    assert writers.count(shared_store) == num * times
    assert len(ids(shared_store, writers.LANE)) == num * times
    head = shared_store.head(writers.LANE)
    assert head is not None
    assert {f"by/p{i}" for i in range(num)} <= set(head.files)
    assert_lane_is_whole(shared_store, writers.LANE)


def test_killed_writers_leave_a_lane_that_can_be_read_and_written(shared_store: Store) -> None:
    """SIGKILL at random moments, while a second writer goes on."""
    chance = random.Random(7)
    for i in range(2 if is_remote(shared_store) else 6):
        steady = start_writer(shared_store, f"steady{i}", times=4)
        doomed = start_writer(shared_store, f"doomed{i}", times=0)
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "ready\n"
        # Kill it some way into its work: after so many more versions, whoever made them.
        target = writers.count(shared_store) + chance.randrange(1, 10)
        while writers.count(shared_store) < target:
            pass
        doomed.kill()
        doomed.communicate()
        steady.communicate(timeout=60)
        assert steady.returncode == 0
        assert writers.count(shared_store) == len(ids(shared_store, writers.LANE))
    assert_lane_is_whole(shared_store, writers.LANE)
    writers.increment(open_store(shared_store.uri), "after")


# --- unknown outcomes ---


class Doubtful:
    """A store whose first publish raises Unknown, after (`landed`) or instead of publishing."""

    def __init__(self, inner: Store, landed: bool) -> None:
        self._inner, self._landed, self._armed = inner, landed, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, *args: Any, **kwargs: Any) -> Version:
        if not self._armed:
            return self._inner.publish(*args, **kwargs)
        self._armed = False
        if self._landed:
            self._inner.publish(*args, **kwargs)
        raise Unknown("the answer was lost")


def test_lookup_finds_a_version_by_its_nonce(store: Store) -> None:
    first = store.publish("main", {"a": b"1"}, expect=None, nonce="one")
    second = store.publish("main", {"a": b"2"}, expect=first, nonce="two")
    assert store.lookup("main", "one") == first
    assert store.lookup("main", "two") == second
    assert store.lookup("main", "three") is None
    assert store.lookup("w-00", "one") is None


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_answer_is_settled_without_publishing_twice(store: Store, landed: bool) -> None:
    first = store.publish("main", {"n": b"1"}, expect=None)
    doubtful: Any = Doubtful(store, landed)
    second = publish_surely(doubtful, "main", {"n": b"2"}, expect=first)
    assert list(store.history("main")) == [first, second]


def test_a_lost_answer_that_another_overtook_is_still_ours(store: Store) -> None:
    """Ours landed, the answer was lost, and a later writer has published on top of it."""

    class Overtaken(Doubtful):
        def publish(self, *args: Any, **kwargs: Any) -> Version:
            mine = self._inner.publish(*args, **kwargs)
            self._inner.publish("main", {"n": b"3"}, expect=mine)
            raise Unknown("the answer was lost")

    doubtful: Any = Overtaken(store, landed=True)
    mine = publish_surely(doubtful, "main", {"n": b"2"}, expect=None)
    assert store.read(mine.ref("n")) == b"2"
    assert len(ids(store, "main")) == 2


# --- bytes ---


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=300))
def test_staged_bytes_come_back_unchanged(store: Store, tmp_path: Path, content: bytes) -> None:
    source, dest = tmp_path / "in", tmp_path / "out"
    source.write_bytes(content)
    ref = store.stage(source)
    assert ref == Ref(hashlib.sha256(content).hexdigest(), len(content))
    assert store.stage(source) == ref
    assert store.fetch(ref, dest) == dest
    assert dest.read_bytes() == content
    assert store.read(ref) == content


def test_a_file_of_many_blocks_comes_back_unchanged(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(random.Random(0).randbytes((5 << 20) + 17))
    fetched = store.fetch(store.stage(source), tmp_path / "deep" / "folder" / "out")
    assert fetched.read_bytes() == source.read_bytes()


def test_a_staged_file_is_invisible_until_published(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(b"weights")
    ref = store.stage(source)
    assert store.lanes() == []
    version = store.publish("main", {"global_b.safetensors": ref}, expect=None)
    assert version.ref("global_b.safetensors") == ref


def test_publishing_what_was_never_staged_is_refused(store: Store) -> None:
    absent = Ref(hashlib.sha256(b"absent").hexdigest(), 6)
    with pytest.raises(NotFound):
        store.publish("main", {"a": absent}, expect=None)
    assert store.head("main") is None


def test_fetching_an_unknown_file_says_so(store: Store, tmp_path: Path) -> None:
    absent = Ref(hashlib.sha256(b"absent").hexdigest(), 6)
    with pytest.raises(NotFound):
        store.fetch(absent, tmp_path / "out")
    with pytest.raises(NotFound):
        store.read(absent)
    assert list(tmp_path.glob("*out*")) == []


def test_a_fetch_replaces_an_older_file(store: Store, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    dest.write_bytes(b"older and longer")
    version = store.publish("main", {"a": b"new"}, expect=None)
    store.fetch(version.ref("a"), dest)
    assert dest.read_bytes() == b"new"


def test_the_selftest_passes_and_leaves_no_lane(store: Store) -> None:
    store.selftest()
    store.selftest()
    assert store.lanes() == []
