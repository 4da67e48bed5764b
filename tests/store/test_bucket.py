"""What a bucket's server may say, and what the store makes of it; addresses and keys."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.store import addresses
from diffurefill.store.base import (
    Busy,
    Denied,
    NotFound,
    Store,
    StoreError,
    Unknown,
    UnsafeStore,
    open_store,
)
from tests.store.object_server import HANG_UP, Fault, ObjectServer, fail
from tests.store.writers import publish_times


@pytest.fixture
def run(s3_server: ObjectServer) -> Store:
    return open_store("s3://bucket/run")


HEAD = "lanes/main/head.json"
SECRET = "secret-of-the-tests"


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
    run: Store, s3_server: ObjectServer, fault: Fault, error: Any, advice: str
) -> None:
    (first,) = publish_times(run, 1)
    s3_server.fault = fail("PUT", HEAD, fault)
    with pytest.raises(error, match=advice) as caught:
        run.publish("main", {"state": b"2"}, expect=first)
    assert not isinstance(caught.value, Unknown)
    assert run.head() == first
    run.publish("main", {"state": b"2"}, expect=first)


@pytest.mark.parametrize("fault", [500, 503, 429, 408, 412, HANG_UP])
def test_passing_trouble_while_reading_or_staging_is_busy(
    run: Store, s3_server: ObjectServer, tmp_path: Path, fault: Fault
) -> None:
    (first,) = publish_times(run, 1)
    source = tmp_path / "weights"
    source.write_bytes(b"weights")
    s3_server.fault = lambda request: fault
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


def test_a_server_that_is_away_is_busy(run: Store, s3_server: ObjectServer) -> None:
    s3_server.close()
    with pytest.raises(Busy, match="out of reach"):
        run.publish("main", {}, expect=None)


def test_one_failed_request_is_repeated_unseen(
    s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 1})
    (first,) = publish_times(open_store("s3://bucket/run"), 1)
    s3_server.fault = fail("GET", HEAD, 500)
    assert open_store("s3://bucket/run").head() == first


def test_keys_that_may_not_write_are_denied_at_once(run: Store, s3_server: ObjectServer) -> None:
    s3_server.fault = lambda request: (403, "AccessDenied") if request.method == "PUT" else None
    with pytest.raises(Denied, match="403 AccessDenied"):
        run.check_access()


def test_a_bucket_that_does_not_exist_is_named(s3_store: Store) -> None:
    absent = open_store("s3://absent-bucket/run")
    with pytest.raises(NotFound, match="no bucket absent-bucket: make it"):
        absent.check_access()
    with pytest.raises(NotFound, match="no bucket absent-bucket: make it"):
        absent.head()


@pytest.mark.parametrize(("status", "error"), [(404, Denied), (503, Busy)])
def test_keys_that_cannot_be_had_say_which_to_set(
    object_server: Callable[[str], ObjectServer],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    error: type[StoreError],
) -> None:
    """Without keys, obstore asks the cloud's own machines for some: here that service fails."""
    metadata = object_server("s3")
    metadata.fault = lambda request: status
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url)
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 0})
    with pytest.raises(error, match="set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/run").check_access()


# --- servers that ignore conditions ---


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
    server = request.getfixturevalue(f"{dialect}_server")
    own_s3 = dialect == "s3"
    store = open_store("s3://bucket/run") if own_s3 else request.getfixturevalue(f"{dialect}_store")
    server.ignored = {ignored}
    with pytest.raises(UnsafeStore, match=fault):
        store.selftest()
    assert not [path for path in server.objects if "/lanes/" in path]


def test_no_key_shows_in_an_error(
    object_server: Callable[[str], ObjectServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers repeat signatures in their answers, and a signature is part of Azure's addresses."""
    server = object_server("azure")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2023&sig={SECRET}")
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 0})
    store = open_store("az://account/container/run")
    told = f"AuthenticationFailed</Code><Detail>{SECRET}</Detail><Code>Again"
    for fault in ((403, told), (500, told), (404, told), (400, told), HANG_UP):
        server.fault = lambda request, fault=fault: fault
        with pytest.raises(StoreError) as caught:
            store.check_access()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert any(SECRET in request.query.get("sig", "") for request in server.requests)


# --- hub buckets ---


@pytest.fixture
def gateway(
    object_server: Callable[[str], ObjectServer], s3_keys: None, monkeypatch: pytest.MonkeyPatch
) -> ObjectServer:
    """The hub's S3 gateway as documented: downloads are redirected to another server."""
    gateway, content = object_server("s3"), object_server("s3")
    content.objects = gateway.objects
    gateway.redirect_downloads_to = content
    monkeypatch.setenv("HF_S3_ENDPOINT", gateway.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere.invalid")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://elsewhere.invalid")
    return gateway


def test_a_hub_bucket_is_reached_through_its_gateway(gateway: ObjectServer, tmp_path: Path) -> None:
    store = open_store("hf://buckets/alice/bucket/run", create=True)
    store.selftest()
    first, second = publish_times(store, 2)
    assert store.fetch(second.ref("state"), tmp_path / "out").read_bytes() == b"2"
    assert list(store.history("main")) == [first, second]
    head = "/alice/bucket/run/lanes/main/head.json"
    create, update = (request.headers for request in gateway.seen("PUT", head))
    assert create["if-none-match"] == "*"
    assert update["if-match"].startswith('"')
    assert all("authorization" in request.headers for request in gateway.requests)
    assert gateway.redirect_downloads_to is not None
    downloads = gateway.redirect_downloads_to.requests
    assert any("range" in request.headers for request in downloads)
    assert not any("authorization" in request.headers for request in downloads)


def test_a_hub_bucket_without_keys_says_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(UserError, match="S3 key pair for your hub token"):
        open_store("hf://buckets/alice/bucket/run")


# --- addresses ---


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("s3://", "give s3://bucket/run"),
        ("s3:///run", "give s3://bucket/run"),
        ("gs://", "give gs://bucket/run"),
        ("az://account", "give az://account/container/run"),
        ("az://account/", "give az://account/container/run"),
        ("hf://buckets/alice", "give hf://buckets/owner/name/run"),
        ("s3://bucket/../other", "plain relative path"),
        ("s3://bucket//run", "plain relative path"),
    ],
)
def test_an_address_that_cannot_be_one_says_what_one_looks_like(
    s3_keys: None, uri: str, advice: str
) -> None:
    with pytest.raises(UserError, match=advice):
        open_store(uri)


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/", "s3://bucket/a/b/"])
def test_a_run_may_lie_anywhere_in_its_bucket(s3_server: ObjectServer, uri: str) -> None:
    publish_times(open_store(uri), 1)
    path = uri.removeprefix("s3:/").rstrip("/")
    assert f"{path}/lanes/main/head.json" in s3_server.objects


@pytest.mark.parametrize(
    ("variable", "uri"),
    [
        ("AWS_ENDPOINT_URL", "s3://bucket/run"),
        ("HF_S3_ENDPOINT", "hf://buckets/alice/bucket/run"),
        ("GOOGLE_BASE_URL", "gs://bucket/run"),
        ("AZURE_STORAGE_ENDPOINT", "az://account/container/run"),
    ],
)
def test_plain_http_is_for_this_machine_only(
    s3_keys: None, monkeypatch: pytest.MonkeyPatch, variable: str, uri: str
) -> None:
    monkeypatch.setenv(variable, "http://store.example.org")
    with pytest.raises(UserError, match=f"{variable}=http://store.example.org: use https"):
        open_store(uri)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_password_in_an_endpoint_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{scheme}://user:{SECRET}@minio.lan:9000/{SECRET}")
    with pytest.raises(UserError, match=f"{scheme}://minio.lan:9000: ") as caught:
        open_store("s3://bucket/run")
    assert SECRET not in str(caught.value)


def test_an_endpoint_without_keys_says_which_variables_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://account.r2.example.org")
    with pytest.raises(UserError, match="set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/run")


def test_unusable_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", f"{SECRET}!")  # not base64
    with pytest.raises(UserError, match="set AZURE_STORAGE_ACCOUNT_KEY") as caught:
        open_store("az://account/container/run")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r"pip install 'diffurefill\[s3\]'"):
        open_store("s3://bucket/run")
