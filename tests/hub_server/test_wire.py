"""What the server promises on the wire where the client does not look. Spec hf-endpoints.md 0-3."""

from __future__ import annotations

import http.client
import json
import random
import re
from urllib.parse import quote, urlsplit

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from hypothesis import given
from hypothesis import strategies as st

from tests.hub_server import Hub
from tests.hub_server.blobs import byte_range
from tests.hub_server.conftest import REPO
from tests.hub_server.http import HubError
from tests.hub_server.repo import git_oid, iso_time, lfs_pointer

DATA = random.Random(2).randbytes(1000)


def call(
    url: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, url.removeprefix(f"http://{parts.netloc}"), body, headers)
    response = connection.getresponse()
    answer = response.status, response.headers, response.read()
    connection.close()
    return answer


def batch(hub: Hub, sha256: str, size: int, transfers: list[str]) -> dict:
    object_ = {"oid": sha256, "size": size}
    body = {"operation": "upload", "transfers": transfers, "objects": [object_]}
    url = f"{hub.url}/{REPO}.git/info/lfs/objects/batch"
    status, _, answer = call(url, "POST", json.dumps(body).encode(), Authorization="Bearer hf_anna")
    assert status == 200
    return json.loads(answer)["objects"][0]["actions"]["upload"]


@given(size=st.integers(1, 50), first=st.integers(0, 60), last=st.integers(0, 60))
def test_byte_range(size: int, first: int, last: int) -> None:
    data = bytes(range(size))
    if first < size and last >= first:
        assert byte_range(f"bytes={first}-{last}", size) == (first, min(last + 1, size))
    elif first >= size:
        with pytest.raises(HubError) as error:
            byte_range(f"bytes={first}-", size)
        assert (error.value.status, error.value.headers) == (
            416,
            {"Content-Range": f"bytes */{size}"},
        )
    if last > 0:
        start, end = byte_range(f"bytes=-{last}", size) or (0, 0)
        assert data[start:end] == data[-last:]
    assert byte_range(None, size) is None


@pytest.mark.parametrize("path", ["w.safetensors", "n.txt"])
def test_ranged_get(hub: Hub, api: HfApi, path: str) -> None:
    add = [CommitOperationAdd(path, DATA)]
    api.create_commit(REPO, add, commit_message="x")
    status, headers, _ = call(f"{hub.url}/{REPO}/resolve/main/{path}", "HEAD")
    url = headers["Location"] if path == "w.safetensors" else f"{hub.url}/{REPO}/resolve/main/n.txt"
    assert status == (302 if path == "w.safetensors" else 200)
    status, headers, data = call(url, Range="bytes=10-19")
    assert (status, data) == (206, DATA[10:20])
    assert headers["Content-Range"] == "bytes 10-19/1000"
    status, headers, _ = call(url, Range="bytes=1000-")
    assert (status, headers["Content-Range"]) == (416, "bytes */1000")


def test_known_object_ids() -> None:
    """Values that `git hash-object` prints."""
    assert git_oid(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert git_oid(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert len(lfs_pointer("0" * 64, 1_234_567)) == 132


def test_dates() -> None:
    assert iso_time(0.5) == "1970-01-01T00:00:00.500Z"


def test_errors_carry_a_code(hub: Hub, api: HfApi) -> None:
    head = api.repo_info(REPO).sha
    missing = f"/{REPO}/resolve/main/none"
    cases = {
        f"/api/models/{REPO}x": "RepoNotFound",
        f"/api/models/{REPO}/revision/none": "RevisionNotFound",
        missing: "EntryNotFound",
    }
    for path, code in cases.items():
        status, headers, body = call(hub.url + path)
        assert (status, headers["X-Error-Code"]) == (404, code)
        assert json.loads(body)["error"] == headers["X-Error-Message"]
        assert re.fullmatch(r"[0-9a-f]{32}", headers["X-Request-Id"])
    assert call(hub.url + missing)[1]["X-Repo-Commit"] == head


def test_names_with_slashes_arrive_encoded(hub: Hub, api: HfApi) -> None:
    add = [CommitOperationAdd("a dir/100%.txt", b"odd")]
    api.create_branch(REPO, branch="workers/w-01")
    api.create_commit(REPO, add, commit_message="x", revision="workers/w-01")
    path = f"{quote('workers/w-01', safe='')}/{quote('a dir/100%.txt')}"
    assert call(f"{hub.url}/{REPO}/resolve/{path}")[2] == b"odd"
    assert call(f"{hub.url}/{REPO}/resolve/workers/w-01/100%25.txt")[0] == 404


def test_an_upload_with_other_bytes_is_refused(hub: Hub, api: HfApi) -> None:
    action = batch(hub, "0" * 64, len(DATA), ["basic"])
    assert call(action["href"], "PUT", DATA)[0] == 400
    verify = json.dumps({"oid": "0" * 64, "size": len(DATA)}).encode()
    url = f"{hub.url}/{REPO}.git/info/lfs/objects/verify"
    assert call(url, "POST", verify, Authorization="Bearer hf_anna")[0] == 404


def test_a_multipart_upload_with_other_parts_is_refused(hub: Hub, api: HfApi) -> None:
    hub.configure(part_bytes=400)
    action = batch(hub, "0" * 64, len(DATA), ["basic", "multipart"])
    urls = [url for name, url in sorted(action["header"].items()) if name.isdigit()]
    assert len(urls) == 3
    etags = [call(url, "PUT", DATA[i * 400 :][:400])[1]["ETag"] for i, url in enumerate(urls)]

    def complete(etags: list[str]) -> tuple[int, str]:
        parts = [{"partNumber": i + 1, "etag": etag} for i, etag in enumerate(etags)]
        body = json.dumps({"oid": "0" * 64, "parts": parts}).encode()
        status, _, answer = call(action["href"], "POST", body)
        return status, json.loads(answer)["error"]

    assert complete(etags[:2]) == (400, "InvalidPart")
    assert complete([etags[0], etags[0], etags[2]]) == (400, "InvalidPart")
    status, message = complete(etags)
    assert status == 400
    assert "sha256" in message


def test_bytes_the_repository_holds_are_not_sent_again(hub: Hub, api: HfApi) -> None:
    for path in ("a.safetensors", "b.safetensors"):
        api.create_commit(REPO, [CommitOperationAdd(path, DATA)], commit_message="x")
    assert hub.count("batch") == 2
    assert hub.count("put") == 1


def test_an_unknown_path_is_told_from_a_missing_entry(hub: Hub) -> None:
    status, headers, _ = call(f"{hub.url}/api/models/anna/run/no-such-thing")
    assert status == 404
    assert headers["X-Error-Code"] is None
