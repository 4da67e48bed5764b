"""Uploads to the hub that fail, are refused or stall. Source: spec hub.md A4."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from diffurefill.store import hub_files
from diffurefill.store.base import Busy, Denied
from diffurefill.store.hub import HubStore
from tests.hub_server import Hub, hub_environment
from tests.store.hub_helpers import URI, opened

WEIGHTS = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits a second and more before it uploads again; here it need not."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


def test_an_upload_that_fails_in_passing_is_busy(
    hub: Hub, hub_store: HubStore, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    for kind in ("batch", "put", "verify"):
        hub.faults.add(kind, "error", status=503, times=6)  # the client gives up after six
        with pytest.raises(Busy, match="503 while uploading"):
            hub_store.stage(source)
        hub.faults.clear()
        source.write_bytes(source.read_bytes() + b"!")
    assert hub_store.stage(source).size == len(b"weights!!!")


@pytest.mark.parametrize(
    ("kind", "action"), [("batch", "object_error"), ("batch", "forbidden"), ("put", "storage_full")]
)
def test_an_upload_that_is_refused_is_denied(
    hub: Hub, hub_store: HubStore, tmp_path: Path, kind: str, action: str
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    hub.faults.add(kind, action)
    with pytest.raises(Denied, match=r"storage|Storage|HF_TOKEN"):
        hub_store.stage(source)


def test_a_stalled_xet_upload_ends(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_environment(monkeypatch, hub, tmp_path / "home", token="hf_alice", xet=True)
    store = HubStore(URI, create=True)
    source = tmp_path / "source"
    source.write_bytes(WEIGHTS)
    hub.faults.add("xet_token", "hang")
    with monkeypatch.context() as patch:
        patch.setattr(hub_files, "longest_transfer", lambda size: 0.3)
        with pytest.raises(Busy):
            store.stage(source)
    hub.faults.clear()
    version = store.publish("main", {"weights": store.stage(source)}, expect=None)
    source.unlink()
    assert hub.count("put") == 0
    assert opened().fetch(version.ref("weights"), tmp_path / "out").read_bytes() == WEIGHTS


def test_repeated_failures_of_xet_lead_to_plain_lfs(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_environment(monkeypatch, hub, tmp_path / "home", token="hf_alice", xet=True)
    store = HubStore(URI, create=True)
    source = tmp_path / "source"
    source.write_bytes(WEIGHTS)

    def broken(**kwargs: object) -> None:
        raise RuntimeError("internal error: entered unreachable code")

    monkeypatch.setattr("huggingface_hub._commit_api._upload_xet_files", broken)
    for _ in range(hub_files.XET_FAILURES):
        assert not constants.HF_HUB_DISABLE_XET
        with pytest.raises(Busy, match="RuntimeError"):
            store.stage(source)
    assert constants.HF_HUB_DISABLE_XET
    store.stage(source)
    assert hub.count("put") == 1
