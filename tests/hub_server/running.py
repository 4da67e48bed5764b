"""Start and stop a hub, in a thread or as a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from tests.hub_server.client import Hub
from tests.hub_server.server import serving

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running_hub(tmp_path: Path) -> Generator[Hub]:
    """A hub in a thread, with its contents under `tmp_path`. Fails if the hub itself failed."""
    with serving(tmp_path / "hub-server") as hub:
        yield Hub(hub.state.hub_url)
    assert hub.state.errors == [], hub.state.errors[0]


@contextlib.contextmanager
def spawned_hub(tmp_path: Path) -> Generator[Hub]:
    """The same as a process, for tests whose own process is busy or gets killed."""
    command = [sys.executable, "-m", "tests.hub_server", "--folder", str(tmp_path / "hub-server")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        hub = Hub(process.stdout.readline().strip())
        yield hub
        errors = hub.errors()
    finally:
        # The process ends when its standard input does, so it cannot outlive a killed test.
        process.stdin.close()
        process.wait(timeout=20)
        process.stdout.close()
    assert errors == [], errors[0]
