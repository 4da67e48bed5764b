"""What is particular to a bucket: lost answers, servers that fail or lie, age, damaged objects."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffurefill.store import addresses, bucket
from diffurefill.store.base import (
    Busy,
    Conflict,
    Corrupt,
    Denied,
    NotFound,
    Store,
    StoreError,
    Unknown,
    UnsafeStore,
    Version,
    open_store,
    publish_surely,
)
from diffurefill.store.objects import ObjectStore
from tests.store.object_server import HANG_UP, LOSE_ANSWER, Fault, ObjectServer, Request

HEAD = "lanes/main/head.json"
SECRET = "secret-of-the-tests"


@pytest.fixture
def server(
    object_server: Callable[[str], ObjectServer], s3_keys: None, monkeypatch: pytest.MonkeyPatch
) -> ObjectServer:
    """An S3 server of our own. Nothing is repeated below the store, so a fault shows at once."""
    server = object_server("s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 0})
    return server


@pytest.fixture
def run(server: ObjectServer) -> ObjectStore:
    return reopened()


def reopened() -> ObjectStore:
    store = open_store("s3://bucket/run")
    assert isinstance(store, ObjectStore)
    return store


def fail(method: str, key: str, fault: Fault, times: int = 1) -> Callable[[Request], Fault]:
    """The first `times` such requests meet `fault`."""
    left = [times]

    def decide(request: Request) -> Fault:
        if request.method == method and request.path.endswith(key) and left[0]:
            left[0] -= 1
            return fault
        return None

    return decide


def seen(server: ObjectServer, method: str, ending: str = "") -> list[Request]:
    return [r for r in server.requests if r.method == method and r.path.endswith(ending)]


def publish_times(store: Store, times: int) -> list[Version]:
    versions: list[Version] = []
    for number in range(1, times + 1):
        expect = versions[-1] if versions else None
        versions.append(store.publish("main", {"state": b"%d" % number}, expect=expect))
    return versions


# --- lost answers and kills ---


@pytest.mark.parametrize("fault", [HANG_UP, LOSE_ANSWER, 500, 503, 504])
def test_a_publish_whose_answer_is_lost_is_unknown_and_ends_as_one_version(
    run: ObjectStore, server: ObjectServer, fault: Fault
) -> None:
    (first,) = publish_times(run, 1)
    server.fault = fail("PUT", HEAD, fault)
    with pytest.raises(Unknown):
        run.publish("main", {"state": b"2"}, expect=first, nonce="mine")
    landed = fault == LOSE_ANSWER
    assert (run.lookup("main", "mine") is not None) == landed
    head = run.head()
    server.fault = fail("PUT", HEAD, fault)
    third = publish_surely(run, "main", {"state": b"3"}, expect=head)
    assert run.head() == third
    assert len(list(run.history("main"))) == (3 if landed else 2)


def test_a_refusal_of_what_landed_is_a_success(run: ObjectStore, server: ObjectServer) -> None:
    """Something between us and the server sent the write twice: the second met our own head."""

    def land_then_refuse(request: Request) -> Fault:
        if request.method == "PUT" and request.path.endswith(HEAD):
            server.answer(request)
            return (412, "PreconditionFailed")
        return None

    (first,) = publish_times(run, 1)
    server.fault = land_then_refuse
    second = run.publish("main", {"state": b"2"}, expect=first)
    server.fault = lambda request: None
    assert list(run.history("main")) == [first, second]


def test_a_refusal_that_cannot_be_read_back_is_unknown(
    run: ObjectStore, server: ObjectServer
) -> None:
    def refuse_then_break(request: Request) -> Fault:
        if request.path.endswith(HEAD) and seen(server, "PUT", HEAD):
            return 412 if request.method == "PUT" else 500
        return None

    server.fault = refuse_then_break
    with pytest.raises(Unknown):
        run.publish("main", {"state": b"1"}, expect=None)


def test_the_outcome_of_our_own_publish_takes_one_request_to_settle(
    run: ObjectStore, server: ObjectServer
) -> None:
    """However long the history is; another process, which knows less, reads all of it."""
    head = publish_times(run, 5)[-1]
    server.fault = fail("PUT", HEAD, HANG_UP)
    with pytest.raises(Unknown):
        run.publish("main", {}, expect=head, nonce="mine")
    server.requests.clear()
    assert run.lookup("main", "mine") is None
    assert len(server.requests) == 1
    assert reopened().lookup("main", "mine") is None
    assert len(server.requests) == 1 + 5


@pytest.mark.parametrize("fault", [HANG_UP, LOSE_ANSWER])
def test_a_kill_at_any_request_leaves_the_old_version_or_the_new_one(
    run: ObjectStore, server: ObjectServer, fault: str
) -> None:
    outcomes, step, finished = set(), 0, False
    while not finished:
        before = list(run.history("main"))
        last = len(server.requests) + step  # the request after this many is the one that is hit

        def dying(request: Request, last: int = last) -> Fault:
            alive = len(server.requests) - 1 - last
            return None if alive < 0 else fault if alive == 0 else HANG_UP

        server.fault = dying
        nonce, expect = f"n{step}", before[-1] if before else None
        with contextlib.suppress(Busy, Unknown):
            run.publish("main", {"a": b"%d" % step, "b": b"b"}, expect=expect, nonce=nonce)
            finished = True
        server.fault = lambda request: None
        after = list(reopened().history("main"))
        assert after[: len(before)] == before
        assert [version.nonce for version in after[len(before) :]] in ([], [nonce])
        for version in after:
            assert [len(run.read(ref)) == ref.size for ref in version.files.values()] == [True] * 2
        outcomes.add(len(after) - len(before))
        step += 1
    assert step > 4
    assert outcomes == {0, 1}


# --- what the server says ---


@pytest.mark.parametrize(
    ("fault", "error", "advice"),
    [
        ((403, "SignatureDoesNotMatch"), Denied, "AWS_SECRET_ACCESS_KEY"),
        ((401, "InvalidToken"), Denied, "read, write, list and delete"),
        ((400, "ExpiredToken"), Denied, "400 ExpiredToken"),
        ((301, "PermanentRedirect"), Denied, "region"),
        ((404, "NoSuchBucket"), NotFound, "no bucket bucket: make it"),
        ((501, "NotImplemented"), UnsafeStore, "no conditional writes"),
        ((409, "ConditionalRequestConflict"), Busy, "another write"),
        ((429, "TooManyRequests"), Busy, "slow down"),
        ((503, "SlowDown"), Busy, "slow down"),
    ],
)
def test_a_refused_publish_says_why_and_changes_nothing(
    run: ObjectStore, server: ObjectServer, fault: Fault, error: Any, advice: str
) -> None:
    (first,) = publish_times(run, 1)
    server.fault = fail("PUT", HEAD, fault)
    with pytest.raises(error, match=advice) as caught:
        run.publish("main", {"state": b"2"}, expect=first)
    assert not isinstance(caught.value, Unknown)
    assert run.head() == first
    run.publish("main", {"state": b"2"}, expect=first)


@pytest.mark.parametrize("fault", [500, 503, 429, 408, HANG_UP])
def test_passing_trouble_while_reading_or_staging_is_busy(
    run: ObjectStore, server: ObjectServer, tmp_path: Path, fault: Fault
) -> None:
    (first,) = publish_times(run, 1)
    source = tmp_path / "weights"
    source.write_bytes(b"weights")
    server.fault = lambda request: fault
    for operation in (
        lambda: run.head(),
        lambda: run.poll(["main"]),
        lambda: run.lanes(),
        lambda: run.stage(source),
        lambda: run.read(first.ref("state")),
        lambda: run.fetch(first.ref("state"), tmp_path / "out"),
        lambda: run.publish("main", {}, expect=first),
        lambda: run.compact("main", first),
        lambda: run.check_access(),
    ):
        with pytest.raises(Busy) as caught:
            operation()
        assert caught.value.retry_after > 0


def test_a_server_that_is_away_is_busy(run: ObjectStore, server: ObjectServer) -> None:
    server.close()
    with pytest.raises(Busy, match="out of reach"):
        run.publish("main", {}, expect=None)


def test_one_failed_request_is_repeated_unseen(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 1})
    (first,) = publish_times(reopened(), 1)
    server.fault = fail("GET", HEAD, 500)
    assert reopened().head() == first


def test_keys_that_may_not_write_are_denied_at_once(run: ObjectStore, server: ObjectServer) -> None:
    server.fault = lambda request: (403, "AccessDenied") if request.method == "PUT" else None
    with pytest.raises(Denied, match="403 AccessDenied"):
        run.check_access()


def test_a_bucket_that_does_not_exist_is_named(s3_store: Store) -> None:
    absent = open_store("s3://absent-bucket/run")
    with pytest.raises(NotFound, match="no bucket absent-bucket: make it"):
        absent.check_access()
    with pytest.raises(NotFound, match="no bucket absent-bucket: make it"):
        absent.head()


@pytest.mark.parametrize(
    ("dialect", "ignored", "fault"),
    [
        ("s3", "if-match", "took a stale update"),
        ("s3", "if-none-match", "created an object twice"),
        ("gs", "x-goog-if-generation-match", "created an object twice"),
        ("az", "if-match", "took a stale update"),
        ("az", "if-none-match", "created an object twice"),
    ],
)
def test_a_server_that_ignores_a_condition_is_refused(
    request: pytest.FixtureRequest, dialect: str, ignored: str, fault: str
) -> None:
    if dialect == "s3":
        server = request.getfixturevalue("server")
        store = reopened()
    else:
        store = request.getfixturevalue(f"{dialect}_store")
        server = request.getfixturevalue(f"{dialect}_server")
    server.ignored = {ignored}
    with pytest.raises(UnsafeStore, match=fault):
        store.selftest()
    assert not [path for path in server.objects if "/lanes/" in path]


def test_no_key_shows_in_an_error(
    object_server: Callable[[str], ObjectServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared access signature is part of every address, so obstore's own text would show it."""
    server = object_server("azure")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2023&sig={SECRET}")
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 0})
    store = open_store("az://account/container/run")
    for fault in (403, 500, 404, 400, HANG_UP):
        server.fault = lambda request, fault=fault: fault
        with pytest.raises(StoreError) as caught:
            store.check_access()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert any(SECRET in request.query.get("sig", "") for request in server.requests)


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
    run: ObjectStore, server: ObjectServer, tmp_path: Path, damaged: bytes
) -> None:
    ref = run.publish("main", {"w": b"weights"}, expect=None).ref("w")
    server.store(server.key(ref.sha256), damaged)
    with pytest.raises(Corrupt, match=ref.sha256):
        run.read(ref)
    with pytest.raises(Corrupt, match=ref.sha256):
        run.fetch(ref, tmp_path / "fetched" / "out")
    assert list((tmp_path / "fetched").iterdir()) == []


def test_a_download_that_goes_wrong_once_is_tried_again(
    run: ObjectStore, server: ObjectServer, tmp_path: Path
) -> None:
    ref = run.publish("main", {"w": b"weights"}, expect=None).ref("w")
    for read in (run.read, lambda ref: run.fetch(ref, tmp_path / "out").read_bytes()):
        server.store(server.key(ref.sha256), b"weighty")

        def heal(request: Request) -> Fault:
            if len(seen(server, "GET", ref.sha256)) == 2:
                server.store(server.key(ref.sha256), b"weights")
            return None

        server.requests.clear()
        server.fault = heal
        assert read(ref) == b"weights"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"lane": "w-01", "id": "1"}', b"\x00"])
def test_a_damaged_head_is_reported_by_name(
    run: ObjectStore, server: ObjectServer, content: bytes
) -> None:
    (first,) = publish_times(run, 1)
    server.store(server.key(HEAD), content)
    with pytest.raises(Corrupt, match=r"s3://bucket/run/lanes/main/head\.json"):
        run.head()
    with pytest.raises((Corrupt, Conflict)):
        run.publish("main", {}, expect=first)


def test_a_missing_version_is_reported_by_name(run: ObjectStore, server: ObjectServer) -> None:
    publish_times(run, 3)
    del server.objects[server.key("versions/00000002.json")]
    with pytest.raises(Corrupt, match=r"versions/00000002\.json is missing"):
        list(run.history("main"))


# --- compaction ---


@pytest.mark.parametrize(("age_seconds", "freed"), [(0, False), (3599, False), (3601, True)])
@pytest.mark.parametrize("now", [1.0e9, 2.5e9])
def test_compaction_goes_by_the_clock_of_the_store(
    run: ObjectStore, server: ObjectServer, now: float, age_seconds: int, freed: bool
) -> None:
    server.clock = lambda: now - age_seconds
    first, second = publish_times(run, 2)
    server.clock = lambda: now
    run.compact("main", second)
    assert any(path.endswith(first.ref("state").sha256) for path in server.objects) is not freed
    assert list(run.history("main")) == [first, second]


def test_compaction_looks_at_every_version_once_and_comes_back_to_what_was_young(
    run: ObjectStore, server: ObjectServer
) -> None:
    versions = publish_times(run, 4)
    run.compact("main", versions[-1])
    server.requests.clear()
    run.grace_seconds = 0.0
    run.compact("main", versions[-1])
    assert seen(server, "GET", "00000001.json") == []
    gone = [v.ref("state").sha256 for v in versions[:-1]]
    assert not [path for path in server.objects if path.rpartition("/")[2] in gone]


def test_a_lost_bookmark_costs_time_only(run: ObjectStore, server: ObjectServer) -> None:
    run.grace_seconds = 0.0
    versions = publish_times(run, 3)
    run.compact("main", versions[-1])
    server.store(server.key("compacted.json"), b"rubbish")
    fourth = run.publish("main", {"state": b"4"}, expect=versions[-1])
    run.compact("main", fourth)
    assert run.read(fourth.ref("state")) == b"4"
    with pytest.raises(NotFound):
        run.read(versions[-1].ref("state"))
