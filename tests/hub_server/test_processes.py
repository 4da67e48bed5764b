"""Several client processes at one hub, which is itself a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from tests.hub_server import environment, hub_environment, spawned_hub
from tests.hub_server.conftest import REPO

NUM_PROCESSES, NUM_INCREMENTS = 4, 5

INCREMENT = """
import json, sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

api, repo, me = HfApi(), sys.argv[1], sys.argv[2]
conflicts = 0
for n in range(int(sys.argv[3])):
    while True:
        head = api.repo_info(repo).sha
        state = json.loads(Path(api.hf_hub_download(repo, "s.json", revision=head)).read_text())
        state = {"count": state["count"] + 1, "nonce": f"{me}.{n}.{conflicts}"}
        operations = [
            CommitOperationAdd("s.json", json.dumps(state).encode()),
            CommitOperationAdd(f"w/{me}.bin", state["nonce"].encode() * 1000),
        ]
        try:
            api.create_commit(repo, operations, commit_message=me, parent_commit=head)
            break
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            conflicts += 1
print(conflicts)
"""


def test_no_increment_is_lost_between_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spawned_hub(tmp_path) as hub:
        hub_environment(monkeypatch, hub, tmp_path / "home")
        api = HfApi(token="hf_anna")
        api.create_repo(REPO)
        start = json.dumps({"count": 0}).encode()
        api.upload_file(path_or_fileobj=start, path_in_repo="s.json", repo_id=REPO)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", INCREMENT, REPO, f"p{n}", str(NUM_INCREMENTS)],
                env=os.environ | environment(hub, tmp_path / f"home-{n}", token=f"hf_p{n}"),
                stdout=subprocess.PIPE,
                text=True,
            )
            for n in range(NUM_PROCESSES)
        ]
        conflicts = sum(int(child.communicate(timeout=60)[0]) for child in children)
        state = json.loads(Path(api.hf_hub_download(REPO, "s.json")).read_text())
        assert state["count"] == NUM_PROCESSES * NUM_INCREMENTS
        commits = hub.log("commit")
        refused = [r for r in commits if r["status"] == 412]
        assert len(refused) == conflicts
        assert len(commits) - conflicts == NUM_PROCESSES * NUM_INCREMENTS + 1
        assert {r["user"] for r in commits} == {"anna", "p0", "p1", "p2", "p3"}


def test_the_port_file_names_both_origins(tmp_path: Path) -> None:
    ports = tmp_path / "ports"
    command = [sys.executable, "-m", "tests.hub_server", "--port-file", str(ports)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ports.read_text() == done.stdout
    hub_url, blob_url = done.stdout.split()
    assert hub_url.startswith("http://127.0.0.1:")
    assert blob_url.startswith("http://127.0.0.1:")
    assert hub_url != blob_url
