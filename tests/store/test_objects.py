"""What is particular to a bucket: lost answers, servers that fail or lie, age, damaged objects."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from diffurefill.store import addresses, bucket
from diffurefill.store.base import (
    Busy,
    Conflict,
    Corrupt,
    NotFound,
    Unknown,
    Version,
    open_store,
    publish_surely,
)
from diffurefill.store.layout import dump_manifest
from diffurefill.store.objects import ObjectStore
from tests.store.object_server import HANG_UP, LOSE_ANSWER, Fault, ObjectServer, Request, fail
from tests.store.writers import publish_times

HEAD = "lanes/main/head.json"


@pytest.fixture
def run(s3_server: ObjectServer) -> ObjectStore:
    return reopened()


def reopened() -> ObjectStore:
    store = open_store("s3://bucket/run")
    assert isinstance(store, ObjectStore)
    return store


# --- lost answers and kills ---


@pytest.mark.parametrize("fault", [HANG_UP, LOSE_ANSWER, 500, 503, 504])
def test_a_publish_whose_answer_is_lost_is_unknown_and_ends_as_one_version(
    run: ObjectStore, s3_server: ObjectServer, fault: Fault
) -> None:
    (first,) = publish_times(run, 1)
    s3_server.fault = fail("PUT", HEAD, fault)
    with pytest.raises(Unknown):
        run.publish("main", {"state": b"2"}, expect=first, nonce="mine")
    landed = fault == LOSE_ANSWER
    assert (run.lookup("main", "mine") is not None) == landed
    head = run.head()
    s3_server.fault = fail("PUT", HEAD, fault)
    third = publish_surely(run, "main", {"state": b"3"}, expect=head)
    assert run.head() == third
    assert len(list(run.history("main"))) == (3 if landed else 2)


def test_a_refusal_of_what_landed_is_a_success(run: ObjectStore, s3_server: ObjectServer) -> None:
    """Something between us and the server sent the write twice: the second met our own head."""

    def land_then_refuse(request: Request) -> Fault:
        if request.method == "PUT" and request.path.endswith(HEAD):
            s3_server.answer(request)
            return (412, "PreconditionFailed")
        return None

    (first,) = publish_times(run, 1)
    s3_server.fault = land_then_refuse
    second = run.publish("main", {"state": b"2"}, expect=first)
    s3_server.fault = lambda request: None
    assert list(run.history("main")) == [first, second]


def test_a_refusal_that_cannot_be_read_back_is_unknown(
    run: ObjectStore, s3_server: ObjectServer
) -> None:
    def refuse_then_break(request: Request) -> Fault:
        if request.path.endswith(HEAD) and s3_server.seen("PUT", HEAD):
            return 412 if request.method == "PUT" else 500
        return None

    s3_server.fault = refuse_then_break
    with pytest.raises(Unknown):
        run.publish("main", {"state": b"1"}, expect=None)


def test_the_outcome_of_our_own_publish_takes_one_request_to_settle(
    run: ObjectStore, s3_server: ObjectServer
) -> None:
    """However long the history is; another process, which knows less, reads all of it."""
    head = publish_times(run, 5)[-1]
    s3_server.fault = fail("PUT", HEAD, HANG_UP)
    with pytest.raises(Unknown):
        run.publish("main", {}, expect=head, nonce="mine")
    s3_server.requests.clear()
    assert run.lookup("main", "mine") is None
    assert len(s3_server.requests) == 1
    assert reopened().lookup("main", "mine") is None
    assert len(s3_server.requests) == 1 + 5


def test_a_contested_write_is_sent_once(
    s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again by a layer below, it could meet its own first try, or land long after."""
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 3})
    run = reopened()
    s3_server.fault = fail("PUT", HEAD, 500)
    with pytest.raises(Unknown):
        run.publish("main", {"state": b"1"}, expect=None)
    assert len(s3_server.seen("PUT", HEAD)) == 1


def test_a_head_that_moves_while_it_is_read_is_a_conflict(
    run: ObjectStore, s3_server: ObjectServer
) -> None:
    """Another publishes between our two looks at the head: its tag must not go with our content."""
    (first,) = publish_times(run, 1)
    other = Version("main", "2", "other", first.files)

    def overtake(request: Request) -> Fault:
        looks = [r for r in s3_server.requests if r.path.endswith(HEAD)]
        if len(looks) == 2:
            s3_server.store(s3_server.key(HEAD), dump_manifest(other))
        return None

    s3_server.requests.clear()
    s3_server.fault = overtake
    with pytest.raises(Conflict):
        run.publish("main", {"state": b"2"}, expect=first)
    assert run.head() == other


@pytest.mark.parametrize("fault", [HANG_UP, LOSE_ANSWER])
def test_a_kill_at_any_request_leaves_the_old_version_or_the_new_one(
    run: ObjectStore, s3_server: ObjectServer, fault: str
) -> None:
    outcomes, step, finished = set(), 0, False
    while not finished:
        before = list(run.history("main"))
        last = len(s3_server.requests) + step  # the request after this many is the one that is hit

        def dying(request: Request, last: int = last) -> Fault:
            alive = len(s3_server.requests) - 1 - last
            return None if alive < 0 else fault if alive == 0 else HANG_UP

        s3_server.fault = dying
        nonce, expect = f"n{step}", before[-1] if before else None
        with contextlib.suppress(Busy, Unknown):
            run.publish("main", {"a": b"%d" % step, "b": b"b"}, expect=expect, nonce=nonce)
            finished = True
        s3_server.fault = lambda request: None
        after = list(reopened().history("main"))
        assert after[: len(before)] == before
        assert [version.nonce for version in after[len(before) :]] in ([], [nonce])
        for version in after:
            assert [len(run.read(ref)) == ref.size for ref in version.files.values()] == [True] * 2
        outcomes.add(len(after) - len(before))
        step += 1
    assert step > 4
    assert outcomes == {0, 1}


# --- bytes ---


@pytest.mark.parametrize("backend", ["s3_store", "gs_store", "az_store"])
def test_a_file_of_several_parts_comes_back_unchanged(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    monkeypatch.setattr(bucket, "WINDOW_BYTES", 5 << 20)  # the smallest part that S3 takes
    store = request.getfixturevalue(backend)
    source = tmp_path / "large"
    source.write_bytes(random.Random(0).randbytes((11 << 20) + 17))
    fetched = store.fetch(store.stage(source), tmp_path / "out")
    assert fetched.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 9000, 9001])
def test_a_file_is_put_together_from_its_windows(
    run: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(bucket, "WINDOW_BYTES", 1000)
    content = random.Random(size).randbytes(size)
    version = run.publish("main", {"a": content}, expect=None)
    assert run.fetch(version.ref("a"), tmp_path / "out").read_bytes() == content


@pytest.mark.parametrize("damaged", [b"weighty", b"weight", b"", b"weights and more"])
def test_a_damaged_blob_is_reported_by_name(
    run: ObjectStore, s3_server: ObjectServer, tmp_path: Path, damaged: bytes
) -> None:
    ref = run.publish("main", {"w": b"weights"}, expect=None).ref("w")
    s3_server.store(s3_server.key(ref.sha256), damaged)
    with pytest.raises(Corrupt, match=ref.sha256):
        run.read(ref)
    with pytest.raises(Corrupt, match=ref.sha256):
        run.fetch(ref, tmp_path / "fetched" / "out")
    assert list((tmp_path / "fetched").iterdir()) == []


def test_a_download_that_goes_wrong_once_is_tried_again(
    run: ObjectStore, s3_server: ObjectServer, tmp_path: Path
) -> None:
    ref = run.publish("main", {"w": b"weights"}, expect=None).ref("w")
    for read in (run.read, lambda ref: run.fetch(ref, tmp_path / "out").read_bytes()):
        s3_server.store(s3_server.key(ref.sha256), b"weighty")

        def heal(request: Request) -> Fault:
            if len(s3_server.seen("GET", ref.sha256)) == 2:
                s3_server.store(s3_server.key(ref.sha256), b"weights")
            return None

        s3_server.requests.clear()
        s3_server.fault = heal
        assert read(ref) == b"weights"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"lane": "w-01", "id": "1"}', b"\x00"])
def test_a_damaged_head_is_reported_by_name(
    run: ObjectStore, s3_server: ObjectServer, content: bytes
) -> None:
    (first,) = publish_times(run, 1)
    s3_server.store(s3_server.key(HEAD), content)
    with pytest.raises(Corrupt, match=r"s3://bucket/run/lanes/main/head\.json"):
        run.head()
    with pytest.raises((Corrupt, Conflict)):
        run.publish("main", {}, expect=first)


def test_a_missing_version_is_reported_by_name(run: ObjectStore, s3_server: ObjectServer) -> None:
    publish_times(run, 3)
    del s3_server.objects[s3_server.key("versions/00000002.json")]
    with pytest.raises(Corrupt, match=r"versions/00000002\.json is missing"):
        list(run.history("main"))


# --- compaction ---


@pytest.mark.parametrize(("age_seconds", "freed"), [(0, False), (3599, False), (3601, True)])
@pytest.mark.parametrize("now", [1.0e9, 2.5e9])
def test_compaction_goes_by_the_clock_of_the_store(
    run: ObjectStore, s3_server: ObjectServer, now: float, age_seconds: int, freed: bool
) -> None:
    s3_server.clock = lambda: now - age_seconds
    first, second = publish_times(run, 2)
    s3_server.clock = lambda: now
    run.compact("main", second)
    assert any(path.endswith(first.ref("state").sha256) for path in s3_server.objects) is not freed
    assert list(run.history("main")) == [first, second]


def test_compaction_looks_at_every_version_once_and_comes_back_to_what_was_young(
    run: ObjectStore, s3_server: ObjectServer
) -> None:
    versions = publish_times(run, 4)
    run.compact("main", versions[-1])
    s3_server.requests.clear()
    run.grace_seconds = 0.0
    run.compact("main", versions[-1])
    assert s3_server.seen("GET", "00000001.json") == []
    gone = [v.ref("state").sha256 for v in versions[:-1]]
    assert not [path for path in s3_server.objects if path.rpartition("/")[2] in gone]


def test_a_lost_bookmark_costs_time_only(run: ObjectStore, s3_server: ObjectServer) -> None:
    run.grace_seconds = 0.0
    versions = publish_times(run, 3)
    run.compact("main", versions[-1])
    s3_server.store(s3_server.key("compacted.json"), b"rubbish")
    fourth = run.publish("main", {"state": b"4"}, expect=versions[-1])
    run.compact("main", fourth)
    assert run.read(fourth.ref("state")) == b"4"
    with pytest.raises(NotFound):
        run.read(versions[-1].ref("state"))
