"""Files in buckets: somebody else's S3 server, and our own in the three dialects."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.data.storage import object_files
from diffurefill.data.storage.files import list_files, open_file, pinned
from diffurefill.data.storage.object_files import Place
from diffurefill.data.storage.patience import Passing
from diffurefill.data.storage.remote import open_remote
from diffurefill.runtime import philox
from tests.data.storage.test_patience import FakeTime
from tests.store.conftest import s3_keys, s3_url
from tests.store.object_server import HANG_UP, LOSE_ANSWER, Fault, ObjectServer, fail

__all__ = ["s3_keys", "s3_url"]

CONTENT = philox("content").bytes(3 << 20)
FILES = {
    "sets/one/data/train-0.parquet": CONTENT,
    "sets/one/data/test-0.parquet": b"PAR1",
    "sets/two/a.jsonl.gz": b"\x1f\x8b",
    "sets/two/b.txt": b"bb",
    "sets/twofold/c.txt": b"c",
    "loose.txt": b"loose",
}
ROOTS = {"s3": "s3://corpora", "gs": "gs://corpora", "az": "az://account/corpora"}


@pytest.fixture
def moto(s3_url: str, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    put_bucket = urllib.request.Request(f"{s3_url}/corpora", method="PUT")
    urllib.request.urlopen(put_bucket, timeout=30).close()
    for path, content in FILES.items():
        Place("s3://corpora").store.put(path, content)


@pytest.fixture(params=list(ROOTS))
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple]:
    """(our server with FILES, address of their bucket) in each dialect."""
    scheme = request.param
    server = ObjectServer({"s3": "s3", "gs": "gcs", "az": "azure"}[scheme])
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "key-of-the-tests",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
        "GOOGLE_BASE_URL": server.url,
        "GOOGLE_BEARER_TOKEN": "token-of-the-tests",
        "AZURE_STORAGE_ENDPOINT": server.url,
        "AZURE_STORAGE_ACCOUNT_KEY": "a2V5LW9mLXRoZS10ZXN0cw==",
    }.items():
        monkeypatch.setenv(name, value)
    for path, content in FILES.items():
        server.store(f"/corpora/{path}", content)
    yield server, ROOTS[scheme]
    server.close()


def names(address: str) -> list[str]:
    return [file.name for file in list_files(address)]


PATHS = [
    ("sets/one", ["data/train-0.parquet"]),
    ("sets/two/", ["a.jsonl.gz", "b.txt"]),
    ("sets/*", ["one/data/train-0.parquet", "two/a.jsonl.gz", "two/b.txt", "twofold/c.txt"]),
    ("sets/*/[bc].txt", ["two/b.txt", "twofold/c.txt"]),
    ("*.txt", ["loose.txt"]),
    ("sets/one/data/test-0.parquet", ["test-0.parquet"]),
    ("", ["loose.txt", "sets/one/data/train-0.parquet", "sets/two/a.jsonl.gz", "sets/two/b.txt",
          "sets/twofold/c.txt"]),
]  # fmt: skip


def test_what_an_address_stands_for_on_a_foreign_server(moto: None) -> None:
    for path, found in PATHS:
        assert names(f"s3://corpora/{path}") == found
    (file,) = list_files("s3://corpora/sets/one")
    assert file.uri == "s3://corpora/sets/one/data/train-0.parquet"
    assert file.size == len(CONTENT)
    opened = open_file(file.uri)
    assert opened.read_at(5, 100) == CONTENT[5:105]
    assert opened.read_at(100, 3 << 20) == CONTENT[100:]
    with pytest.raises(UserError, match="no such bucket: s3://nowhere"):
        list_files("s3://nowhere/a")


def test_what_an_address_stands_for_in_each_dialect(place: tuple[ObjectServer, str]) -> None:
    _, root = place
    for path, found in PATHS:
        assert names(f"{root}/{path}") == found
    for file in list_files(f"{root}/sets"):
        assert file.uri == f"{root}/sets/{file.name}"
        opened, content = open_file(file.uri), FILES[f"sets/{file.name}"]
        assert opened.size == file.size == len(content)
        assert opened.read_at(0, 1 << 22) == content
        assert opened.read_at(len(content) - 1, 5) == content[-1:]
    assert pinned(f"{root}/sets") == f"{root}/sets"


@pytest.mark.parametrize(
    ("path", "message"),
    [("gone", "no such file or folder: "), ("sets/*.txt", "no file matches the data source ")],
)
def test_a_path_that_is_not_there(place: tuple[ObjectServer, str], path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list_files(f"{place[1]}/{path}")
    with pytest.raises(UserError, match=r"no such file or folder: .*gone"):
        open_file(f"{place[1]}/gone")


@pytest.mark.parametrize("fault", [HANG_UP, LOSE_ANSWER, 408, 429, 500, 503])
def test_trouble_passes(place: tuple[ObjectServer, str], fault: Fault) -> None:
    (server, root), time = place, FakeTime()
    file = open_remote(f"{root}/sets/one/data/train-0.parquet", time.patience)
    server.fault = fail("GET", "train-0.parquet", fault)
    assert file.read_at(10, 1000) == CONTENT[10:1010]
    assert len(time.slept) == 1


def test_trouble_in_a_listing_passes_or_ends_within_a_minute(
    place: tuple[ObjectServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (server, root), time = place, FakeTime(60.0)
    monkeypatch.setattr(object_files, "LISTING", time.patience)
    pending = [503, 503]
    server.fault = lambda request: pending.pop() if pending else None
    assert names(f"{root}/sets/two") == ["a.jsonl.gz", "b.txt"]
    assert len(time.slept) == 2
    server.fault = lambda request: 503
    with pytest.raises(
        UserError, match=r"/sets/two cannot be reached: .* in 1 min .* answered 503"
    ):
        list_files(f"{root}/sets/two")


def test_trouble_that_stays_ends_after_a_quarter_of_an_hour(
    place: tuple[ObjectServer, str],
) -> None:
    (server, root), time = place, FakeTime()
    server.fault = lambda request: 503
    with pytest.raises(UserError, match=r"loose\.txt cannot be reached: .* in 15 min"):
        open_remote(f"{root}/loose.txt", time.patience)
    assert time.now == pytest.approx(900.0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (401, "may not be read with these keys: set "),
        (403, "may not be read with these keys: set "),
        (400, "check address and region"),
        ((404, "NoSuchBucket"), "no such "),
        ((404, "ContainerNotFound"), "no such "),
    ],
)
def test_a_refusal_fails_at_once_and_shows_no_key(
    place: tuple[ObjectServer, str], fault: Fault, message: str
) -> None:
    (server, root), time = place, FakeTime()
    file = open_remote(f"{root}/loose.txt", time.patience)
    server.fault = lambda request: fault
    for ask in (lambda: list_files(f"{root}/loose.txt"), lambda: file.read_at(0, 3)):
        with pytest.raises(UserError, match=message) as caught:
            ask()
        assert "-of-the-tests" not in str(caught.value)
        assert "a2V5" not in str(caught.value)
    assert time.slept == []


@pytest.mark.parametrize("content", [b"another", CONTENT[::-1], CONTENT + b"x"])
def test_an_object_that_changed_while_it_was_read_is_an_error(
    place: tuple[ObjectServer, str], content: bytes
) -> None:
    (server, root), path = place, "sets/one/data/train-0.parquet"
    file = open_file(f"{root}/{path}")
    file.read_at(0, 10)
    server.store(f"/corpora/{path}", content)
    with pytest.raises(UserError, match=r"train-0\.parquet changed while it was read"):
        file.read_at(2 << 20, 10)


class ShortAnswers:
    """A store whose bodies are too short: obstore itself would have to fail for that."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def get(self, path: str, options: dict) -> Any:
        answer = self._store.get(path, options=options)
        return SimpleNamespace(meta=answer.meta, bytes=lambda: b"lo")


def test_a_short_body_is_not_used(place: tuple[ObjectServer, str]) -> None:
    ranges = object_files.object_ranges(f"{place[1]}/loose.txt")
    ranges.open()
    assert ranges.read(0, 3) == b"loo"
    ranges._place.store = ShortAnswers(ranges._place.store)
    with pytest.raises(Passing, match="an answer held 2 of 3 bytes"):
        ranges.read(0, 3)


@pytest.mark.parametrize("address", ["s3://", "gs:///a", "az://account", "az://account//x"])
def test_an_address_without_a_bucket_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=rf"give {address[:2]}://"):
        list_files(address)


def test_a_machine_without_obstore_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r"s3://b/a needs obstore: pip install 'diffurefill\[s3\]'"):
        list_files("s3://b/a")


def test_keys_that_cannot_be_used_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64: secret!")
    with pytest.raises(UserError, match="address or keys cannot be used; set AZURE") as caught:
        list_files("az://account/container/a")
    assert "secret" not in str(caught.value)


def test_http_is_for_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://storage.example")
    with pytest.raises(UserError, match=r"AWS_ENDPOINT_URL=http://storage\.example: use https"):
        list_files("s3://b/a")


def test_s3_off_aws_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://storage.example")
    with pytest.raises(UserError, match=r"no keys for https://storage\.example: set AWS_ACCESS"):
        list_files("s3://b/a")


@pytest.mark.parametrize(("status", "num_waits"), [(404, 0), (503, 1)])
def test_a_machine_that_hands_out_no_keys(
    monkeypatch: pytest.MonkeyPatch, status: int, num_waits: int
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    server, time = ObjectServer("s3"), FakeTime(60.0)
    server.fault = lambda request: status
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
    monkeypatch.setattr(object_files, "LISTING", time.patience)
    with pytest.raises(UserError, match="no keys for s3://b/a: set AWS_ACCESS_KEY_ID"):
        list_files("s3://b/a")
    assert bool(time.slept) == bool(num_waits)
    assert {request.path for request in server.requests} == {"/latest/api/token"}
    server.close()
