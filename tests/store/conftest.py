"""One `store` fixture per backend; the contract suite runs on each of them."""

from pathlib import Path

import pytest

from diffurefill.store.base import Store
from diffurefill.store.folder import FolderStore


@pytest.fixture(params=["folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of the backend `request.param`; its `uri` opens in another process too."""
    makers = {"folder": lambda: FolderStore(tmp_path / "run", create=True)}
    return makers[request.param]()
