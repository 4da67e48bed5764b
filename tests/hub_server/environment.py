"""Point `huggingface_hub` at a hub, in this process or in a child's environment."""

from __future__ import annotations

import warnings
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hub_server.client import Hub


def environment(hub: Hub, home: Path, token: str | None = None, xet: bool = False) -> dict:
    """Variables for a child process: its own HF_HOME, no telemetry, no proxy, LFS unless `xet`."""
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_XET": "0" if xet else "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    if token is not None:
        variables["HF_TOKEN"] = token
    return variables


def hub_environment(
    monkeypatch: pytest.MonkeyPatch,
    hub: Hub,
    home: Path,
    token: str | None = None,
    xet: bool = False,
) -> None:
    """The same for this process, although the client has read its environment already."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_XET_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(hub, home, token, xet).items():
        monkeypatch.setenv(name, value)
    import huggingface_hub
    from huggingface_hub import constants, hf_api

    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_URL_HOSTS": constants.HF_URL_HOSTS | {urlsplit(hub.url).hostname},
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": not xet,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_PROGRESS_BARS": True,
        "AGENT_HARNESSES_PATH": str(home / ".agent_harnesses.json"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_CACHE": str(home / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "HF_XET_CACHE": str(home / "xet"),
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    # A pooled connection to an earlier test's hub must not be reused or left to the collector.
    huggingface_hub.close_session()
    # The client uploads with a keyword its own HTTP library has deprecated; not ours to fix.
    warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
