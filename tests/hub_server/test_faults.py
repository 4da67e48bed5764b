"""Every fault, as the unmodified client meets it. Spec hf-endpoints.md 7."""

from __future__ import annotations

import hashlib
import http.client
import random
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import parse_ratelimit_headers

from tests.hub_server import Hub
from tests.hub_server.conftest import REPO

DATA = random.Random(1).randbytes(400_000)


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits a second and more before it tries again; here it need not."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


def put(api: HfApi, data: bytes, path: str = "n", **kwargs) -> str:
    add = CommitOperationAdd(path, data)
    return api.create_commit(REPO, [add], commit_message="put", **kwargs).oid


def read(api: HfApi, path: str, revision: str, **kwargs) -> bytes:
    return Path(api.hf_hub_download(REPO, path, revision=revision, **kwargs)).read_bytes()


def failure(api: HfApi, data: bytes = b"1", **kwargs) -> HfHubHTTPError:
    with pytest.raises(HfHubHTTPError) as error:
        put(api, data, **kwargs)
    return error.value


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("error", 503, "503"),
        ("locked", 409, "Another commit operation is in progress"),
        ("conflict", 412, "A commit has happened since"),
        ("unauthorized", 401, "Invalid credentials"),
        ("forbidden", 403, "read-only"),
        ("storage_full", 403, "Storage limit reached"),
    ],
)
def test_a_refused_commit_changes_nothing(
    hub: Hub, api: HfApi, action: str, status: int, words: str
) -> None:
    head = api.repo_info(REPO).sha
    hub.faults.add("commit", action, status=status, times=2)
    for _ in range(2):
        error = failure(api)
        assert error.response.status_code == status
        assert words in str(error)
    assert api.repo_info(REPO).sha == head
    put(api, b"1")


def test_rate_limits_differ_in_what_remains(hub: Hub, api: HfApi) -> None:
    hub.faults.add("commit", "rate_limited", seconds=7)
    hub.faults.add("commit", "hourly_limit")
    limited, hourly = failure(api), failure(api)
    first, second = (parse_ratelimit_headers(e.response.headers) for e in (limited, hourly))
    assert limited.response.status_code == hourly.response.status_code == 429
    assert first is not None
    assert (first.remaining, first.reset_in_seconds) == (0, 7)
    assert second is not None
    assert second.remaining > 0
    assert "rate limit for repository commits (128 per hour)" in str(hourly)


def test_the_commit_quota_lasts_an_hour_of_the_hubs_clock(hub: Hub, api: HfApi) -> None:
    hub.configure(commits_per_hour=3)
    for n in range(3):
        put(api, b"%d" % n)
    assert "(3 per hour)" in str(failure(api, b"one too many"))
    put(HfApi(endpoint=hub.url, token="hf_ben"), b"another account")
    hub.advance_clock(3601)
    put(api, b"one hour later")


def test_a_commit_may_be_applied_although_the_answer_is_an_error(hub: Hub, api: HfApi) -> None:
    hub.faults.add("commit", "error_after", status=500)
    assert failure(api, b"done").response.status_code == 500
    assert read(api, "n", "main") == b"done"


@pytest.mark.parametrize(("action", "applied"), [("drop", False), ("drop_after", True)])
def test_a_dropped_connection_tells_nothing(
    hub: Hub, api: HfApi, action: str, applied: bool
) -> None:
    hub.faults.add("commit", action)
    with pytest.raises(httpx2.RemoteProtocolError):
        put(api, b"1")
    assert api.file_exists(REPO, "n") == applied
    assert hub.log("commit")[0]["status"] is None


@pytest.mark.parametrize(("action", "applied"), [("hang", False), ("hang_after", True)])
def test_no_answer_until_cleared(hub: Hub, api: HfApi, action: str, applied: bool) -> None:
    hub.faults.add("branch", action, times=None)
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc, timeout=0.2)
    headers = {"Authorization": "Bearer hf_anna"}
    connection.request("POST", f"/api/models/{REPO}/branch/b", body="{}", headers=headers)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    hub.faults.clear()
    assert ("b" in [b.name for b in api.list_repo_refs(REPO).branches]) == applied


def test_clearing_lets_go_what_hangs(hub: Hub, api: HfApi) -> None:
    hub.faults.add("info", "hang")
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc, timeout=30)
    connection.request("GET", f"/api/models/{REPO}")
    while not hub.log("info"):
        pass  # the server is another thread: asking for the log lets it run
    hub.faults.clear()
    with pytest.raises(http.client.RemoteDisconnected):
        connection.getresponse()
    connection.close()


def test_lagging_reads_show_the_head_before(hub: Hub, api: HfApi) -> None:
    first = put(api, b"1")
    second = put(api, b"2")
    for kind in ("info", "refs", "commits"):
        hub.faults.add(kind, "stale")
    hub.faults.add("resolve", "stale", times=2)  # a HEAD and a GET
    assert api.repo_info(REPO).sha == first
    assert api.list_repo_refs(REPO).branches[0].target_commit == first
    assert api.list_repo_commits(REPO)[0].commit_id == first
    assert read(api, "n", "main") == b"1"
    assert api.repo_info(REPO).sha == second
    assert read(api, "n", "main") == b"2"
    hub.faults.add("any", "stale", times=None)
    assert read(api, "n", second) == b"2"
    assert [api.repo_info(REPO).sha for _ in range(3)] == [first] * 3
    put(api, b"3", parent_commit=second)


def test_a_hub_that_is_down_makes_the_client_serve_its_old_copy(hub: Hub, api: HfApi) -> None:
    """Why the product never reads by a branch's name."""
    put(api, b"old")
    assert read(api, "n", "main") == b"old"
    put(api, b"new")
    hub.faults.add("resolve", "error", status=503, times=None)
    assert read(api, "n", "main") == b"old"
    hub.faults.clear("resolve")
    assert read(api, "n", "main") == b"new"


def test_everything_can_be_down_at_once(hub: Hub, api: HfApi) -> None:
    hub.faults.add("any", "drop", times=None)
    with pytest.raises(httpx2.RemoteProtocolError):
        api.whoami()
    with pytest.raises(httpx2.HTTPError):
        put(api, b"1")
    hub.faults.clear()
    hub.faults.add("any", "error", status=503, times=None)
    with pytest.raises(HfHubHTTPError):
        api.repo_info(REPO)
    hub.faults.clear()
    put(api, b"1")


@pytest.mark.parametrize("path", ["w.safetensors", "n"])
def test_the_client_accepts_a_flipped_byte(hub: Hub, api: HfApi, path: str) -> None:
    """Why the product hashes what it downloads: the client compares the size only."""
    oid = put(api, DATA, path)
    if path == "w.safetensors":
        hub.faults.add("blob", "flip")
    else:
        hub.faults.add("resolve", "flip", skip=1)  # the HEAD comes first
    got = read(api, path, oid)
    assert len(got) == len(DATA)
    assert sum(a != b for a, b in zip(got, DATA, strict=True)) == 1


def test_the_client_notices_a_short_object(hub: Hub, api: HfApi) -> None:
    oid = put(api, DATA, "w.safetensors")
    hub.faults.add("blob", "truncate", times=None)
    with pytest.raises(OSError, match="Consistency check failed"):
        read(api, "w.safetensors", oid)


@pytest.mark.parametrize("action", ["cut", "stall"])
def test_the_client_resumes_a_broken_download(
    hub: Hub, api: HfApi, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    oid = put(api, DATA, "w.safetensors")
    hub.faults.add("blob", action, times=2)
    assert read(api, "w.safetensors", oid) == DATA
    assert hub.count("blob") == 3


def test_upload_faults_are_retried_by_the_client(hub: Hub, api: HfApi) -> None:
    hub.faults.add("put", "error", status=503)
    hub.faults.add("put", "drop")
    hub.faults.add("batch", "error", status=500)
    oid = put(api, DATA, "w.safetensors")
    assert read(api, "w.safetensors", oid) == DATA
    assert [r["status"] for r in hub.log("put")] == [503, None, 200]


def test_batch_errors(hub: Hub, api: HfApi) -> None:
    hub.faults.add("batch", "object_error")
    with pytest.raises(ValueError, match="too large"):
        put(api, DATA, "w.safetensors")
    hub.faults.add("batch", "storage_full")
    assert failure(api, DATA, path="w.safetensors").response.status_code == 403
    hub.faults.add("batch", "error", status=413)
    assert failure(api, DATA, path="w.safetensors").response.status_code == 413


def test_a_lost_object_cannot_be_downloaded(hub: Hub, api: HfApi) -> None:
    oid = put(api, DATA, "w.safetensors")
    hub.forget_object(hashlib.sha256(DATA).hexdigest())
    with pytest.raises((HfHubHTTPError, LocalEntryNotFoundError)):
        read(api, "w.safetensors", oid)


def test_faults_can_skip_and_choose_by_path(hub: Hub, api: HfApi) -> None:
    hub.faults.add("commit", "locked", skip=1, match="/commit/workers")
    api.create_branch(REPO, branch="workers/w01")
    put(api, b"1")
    put(api, b"2", revision="workers/w01")
    assert failure(api, b"3", revision="workers/w01").response.status_code == 409
    assert hub.faults.active() == []


def test_a_fault_nobody_acts_out_is_refused(hub: Hub) -> None:
    with pytest.raises(ValueError, match="no requests of kind"):
        hub.faults.add("comit", "locked")
    with pytest.raises(ValueError, match="no fault"):
        hub.faults.add("commit", "lock")
    with pytest.raises(ValueError, match="is for"):
        hub.faults.add("commit", "stale")
    with pytest.raises(ValueError, match="no setting"):
        hub.configure(part_size=1)
