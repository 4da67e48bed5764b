"""A process that may not write to the run says so at once, before it loads anything heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diffurefill.store.hub import HubStore
from tests.hub_server import environment, running_hub
from tests.hub_server.environment import hub_environment

PROBE = """
import sys
from diffurefill.cli import main
code = main(sys.argv[1:])
print("torch" in sys.modules, code)
"""


@pytest.mark.parametrize(
    ("token", "advice"),
    [
        ("hf_ro_alice", "set HF_TOKEN to a token that may write"),
        ("rubbish-token", "set HF_TOKEN"),
        (None, "set HF_TOKEN"),
    ],
)
@pytest.mark.parametrize("command", ["worker", "merger"])
def test_a_wrong_token_is_told_before_torch_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, token: str | None, advice: str
) -> None:
    with running_hub(tmp_path) as hub:
        hub_environment(monkeypatch, hub, tmp_path / "home", token="hf_alice")
        HubStore("hf://alice/run", create=True).publish("main", {"a": b"1"}, expect=None)
        monkeypatch.delenv("HF_TOKEN")
        for name, value in environment(hub, tmp_path / "empty-home", token).items():
            monkeypatch.setenv(name, value)
        done = subprocess.run(
            [sys.executable, "-c", PROBE, command, "hf://alice/run"], capture_output=True, text=True
        )
    assert done.stdout.splitlines()[-1] == "False 2"
    assert advice in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert token is None or token not in done.stderr
