"""A hub in a thread, and the client pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from tests.hub_server import Hub, hub_environment, running_hub

REPO = "anna/run"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(tmp_path) as hub:
        hub_environment(monkeypatch, hub, tmp_path / "home")
        yield hub


@pytest.fixture
def api(hub: Hub) -> HfApi:
    """Anna, who may write; her repository `anna/run` exists."""
    api = HfApi(endpoint=hub.url, token="hf_anna")
    api.create_repo(REPO)
    hub.clear_log()
    return api
