"""One `store` fixture per backend; the contract suite runs on each of them."""

from pathlib import Path

import pytest

from diffurefill.store.base import Store
from diffurefill.store.folder import FolderStore
from tests.store.memory import MemoryStore


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store. `memory` is the fake of the fleet tests: it must not promise less."""
    makers = {"folder": lambda: FolderStore(tmp_path / "run", create=True), "memory": MemoryStore}
    return makers[request.param]()


@pytest.fixture
def shared_store(tmp_path: Path) -> Store:
    """An empty store that other processes open by its `uri`."""
    return FolderStore(tmp_path / "run", create=True)
