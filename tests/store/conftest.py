"""One `store` fixture per backend; the contract suite runs on each of them."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest

from diffurefill.store import addresses
from diffurefill.store.base import Store, new_nonce, open_store
from diffurefill.store.folder import FolderStore
from diffurefill.store.hub import HubStore
from tests.hub_server import Hub, hub_environment, running_hub
from tests.store.memory import MemoryStore
from tests.store.object_server import ObjectServer


@pytest.fixture(params=["folder", "memory", "hub", "s3", "gs", "az"])
def store(request: pytest.FixtureRequest) -> Store:
    """An empty store. `memory` is the fake of the fleet tests: it must not promise less."""
    return request.getfixturevalue(f"{request.param}_store")


@pytest.fixture(params=["folder", "s3"])
def shared_store(request: pytest.FixtureRequest) -> Store:
    """An empty store that other processes open by its `uri`."""
    return request.getfixturevalue(f"{request.param}_store")


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "run", create=True)


@pytest.fixture
def memory_store() -> Store:
    return MemoryStore()


# --- the hub ---


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of this test's own, and this process set up to use it as alice."""
    with running_hub(tmp_path) as hub:
        hub_environment(monkeypatch, hub, tmp_path / "home", token="hf_alice")
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def hub_store(hub: Hub) -> HubStore:
    return HubStore("hf://alice/run", create=True, commits_per_hour=10_000)


# --- object stores ---


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """moto's server: somebody else's idea of S3."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-tests")


@pytest.fixture
def s3_store(s3_url: str, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> Store:
    """In a bucket of its own. Other processes find the server in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    bucket = f"test-{new_nonce()}"
    put_bucket = urllib.request.Request(f"{s3_url}/{bucket}", method="PUT")
    urllib.request.urlopen(put_bucket, timeout=30).close()
    return open_store(f"s3://{bucket}/some/run", create=True)


@pytest.fixture
def object_server() -> Iterator[Callable[[str], ObjectServer]]:
    """Starts object servers of our own, by dialect."""
    servers: list[ObjectServer] = []

    def start(dialect: str = "s3") -> ObjectServer:
        servers.append(ObjectServer(dialect))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def s3_server(
    object_server: Callable[[str], ObjectServer], s3_keys: None, monkeypatch: pytest.MonkeyPatch
) -> ObjectServer:
    """An S3 server of our own. Nothing is repeated below the store, so a fault shows at once."""
    server = object_server("s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(addresses, "PATIENT", {"max_retries": 0})
    return server


@pytest.fixture
def gs_server(object_server: Callable[[str], ObjectServer]) -> ObjectServer:
    return object_server("gcs")


@pytest.fixture
def gs_store(gs_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("GOOGLE_BASE_URL", gs_server.url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token-of-the-tests")
    return open_store("gs://bucket/some/run", create=True)


@pytest.fixture
def az_server(object_server: Callable[[str], ObjectServer]) -> ObjectServer:
    return object_server("azure")


@pytest.fixture
def az_store(az_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", az_server.url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5LW9mLXRoZS10ZXN0cw==")
    return open_store("az://account/container/some/run", create=True)
