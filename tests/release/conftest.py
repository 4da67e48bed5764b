"""A small run, and what was exported of it, once for all tests of the room."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffurefill.cli import main
from diffurefill.release import export
from tests.release.runs import tiny_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_run(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def exported(run: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported by the command, which opens it in another process before it has this name."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", run, "--to", str(folder)]) == 0
    return folder


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports in this test are not opened by another process: that takes seconds, and is tested."""
    monkeypatch.setattr(export, "check_folder", lambda folder, reference: {"torch": "not tried"})
