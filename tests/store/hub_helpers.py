"""A hub run as the tests look at it: through other processes' eyes, and past the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from diffurefill.store.base import Ref, Store
from diffurefill.store.hub import HubStore
from diffurefill.store.hub_files import MANIFEST
from tests.hub_server import Hub

URI, REPO = "hf://alice/run", "alice/run"


def opened(**kwargs: Any) -> HubStore:
    """The run as another process sees it: without any memory of it."""
    return HubStore(URI, create=False, **kwargs)


def staged(store: Store, folder: Path, content: bytes) -> Ref:
    """Stages a file `source` in `folder`."""
    source = folder / "source"
    source.write_bytes(content)
    return store.stage(source)


def kinds(hub: Hub) -> list[str]:
    """What was asked of the hub, request by request."""
    return [record["kind"] for record in hub.log()]


def files(hub: Hub, branch: str) -> set[str]:
    """A branch's files but for the store's own and git's."""
    paths = set(HfApi(endpoint=hub.url).list_repo_files(REPO, revision=branch))
    return paths - {".gitattributes", MANIFEST}
