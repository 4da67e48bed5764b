"""Real Xet chunks and buckets, with a folder for the content store. Spec hf-endpoints.md 5, 6.

Each flow is a child process: the client reads HF_ENDPOINT and its caches at import, and the local
content store lets one process upload at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import Hub, environment, running_hub

PRELUDE = """
import hashlib, random
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, HfHubHTTPError
api = HfApi()
def blob(seed, size=3_000_000): return random.Random(seed).randbytes(size)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub(tmp_path) as hub:
        yield hub


def run_client(hub: Hub, tmp_path: Path, code: str, xet: bool = True) -> None:
    """`code` in a process whose client knows only the environment; its asserts decide."""
    home = tmp_path / "home"
    variables = environment(hub, home, token="hf_anna", xet=xet)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_xet_up_down_and_deduplication(hub: Hub, tmp_path: Path) -> None:
    code = """
    api.create_repo("anna/run")
    def commit(path, data):
        Path("source").write_bytes(data)
        add = [CommitOperationAdd(path, "source")]
        return api.create_commit("anna/run", add, commit_message="x").oid
    first = commit("a.safetensors", blob(1))
    second = commit("b.safetensors", blob(1) + blob(2, 200_000))
    for path, data in (("a.safetensors", blob(1)), ("b.safetensors", blob(1) + blob(2, 200_000))):
        got = Path(api.hf_hub_download("anna/run", path, revision=second)).read_bytes()
        assert got == data
        [info] = api.get_paths_info("anna/run", [path])
        assert info.lfs.sha256 == hashlib.sha256(data).hexdigest()
        assert len(info.xet_hash) == 64
    """
    run_client(hub, tmp_path, code)
    assert hub.count("xet_token") >= 2
    assert hub.count("batch") == hub.count("put") == hub.count("blob") == 0
    total = sum(f.stat().st_size for f in tmp_path.glob("hub-server/cas/**/*") if f.is_file())
    assert 3_200_000 < total < 4_000_000, "6.2 MB in two files that share 3 MB"
    plain = """
    for path, size in (("a.safetensors", 3_000_000), ("b.safetensors", 3_200_000)):
        got = Path(api.hf_hub_download("anna/run", path, cache_dir="plain")).read_bytes()
        assert got == (blob(1) + blob(2, 200_000))[:size]
    """
    run_client(hub, tmp_path, plain, xet=False)
    assert hub.count("blob") == 2


def test_buckets(hub: Hub, tmp_path: Path) -> None:
    code = """
    url = api.create_bucket("anna/b")
    assert api.create_bucket("anna/b", exist_ok=True).bucket_id == url.bucket_id == "anna/b"
    Path("w.bin").write_bytes(blob(1))
    api.batch_bucket_files("anna/b", add=[("w.bin", "w/01/w.bin"), (b"log", "log/w-01.jsonl")])
    files = {f.path: f for f in api.list_bucket_tree("anna/b", recursive=True)}
    assert set(files) == {"w/01/w.bin", "log/w-01.jsonl"}
    assert files["w/01/w.bin"].size == 3_000_000
    assert sorted(f.path for f in api.list_bucket_tree("anna/b")) == ["log", "w"]
    [info] = api.get_bucket_paths_info("anna/b", ["w/01/w.bin", "absent"])
    assert info.xet_hash == files["w/01/w.bin"].xet_hash
    assert api.bucket_info("anna/b").total_files == 2

    api.download_bucket_files("anna/b", [("w/01/w.bin", "down.bin"), ("log/w-01.jsonl", "l")])
    assert Path("down.bin").read_bytes() == blob(1)
    assert Path("l").read_bytes() == b"log"

    try:
        api.batch_bucket_files("anna/b", add=[(b"new", "new")], delete=["absent", "log/w-01.jsonl"])
        raise SystemExit("a partial failure must raise")
    except BucketBatchError as error:
        assert [f["path"] for f in error.failures] == ["absent"]
    left = {f.path for f in api.list_bucket_tree("anna/b", recursive=True)}
    assert left == {"new", "w/01/w.bin"}

    Path("folder/x").mkdir(parents=True)
    Path("folder/x/1").write_bytes(b"one")
    api.sync_bucket("folder", "hf://buckets/anna/b/synced", quiet=True)
    api.sync_bucket("hf://buckets/anna/b/synced", "back", quiet=True)
    assert Path("back/x/1").read_bytes() == b"one"

    api.create_repo("anna/run")
    add = [CommitOperationAdd("global.safetensors", blob(3))]
    api.create_commit("anna/run", add, commit_message="x")
    api.copy_files("hf://anna/run/global.safetensors", "hf://buckets/anna/b/")
    api.download_bucket_files("anna/b", [("global.safetensors", "g")])
    assert Path("g").read_bytes() == blob(3)

    api.delete_bucket("anna/b")
    try:
        api.bucket_info("anna/b")
        raise SystemExit("the bucket must be gone")
    except BucketNotFoundError:
        pass
    """
    run_client(hub, tmp_path, code)
    statuses = [r["status"] for r in hub.log("bucket_batch")]
    assert set(statuses) == {200}
