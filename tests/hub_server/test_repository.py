"""The unmodified client against the hub: repositories, commits, refs. Spec hf-endpoints.md 8."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    HfFileSystem,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder

from tests.hub_server import Hub
from tests.hub_server.conftest import REPO

WEIGHTS = "weights/global_b.safetensors"


@pytest.fixture(scope="module")
def weights() -> bytes:
    return random.Random(0).randbytes(6_000_000)


def put(api: HfApi, path: str, data: bytes, **kwargs) -> str:
    """One commit of one file; its id."""
    add = CommitOperationAdd(path, data)
    return api.create_commit(REPO, [add], commit_message=f"put {path}", **kwargs).oid


def read(api: HfApi, path: str, revision: str) -> bytes:
    return Path(api.hf_hub_download(REPO, path, revision=revision)).read_bytes()


def status_of(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return error.value.response.status_code


def test_create_repo(hub: Hub, api: HfApi) -> None:
    assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
    assert api.create_repo("anna/d", repo_type="dataset").repo_type == "dataset"
    with pytest.raises(HfHubHTTPError) as error:
        api.create_repo(REPO)
    assert status_of(error) == 409
    assert api.list_repo_files(REPO) == [".gitattributes"]
    api.delete_repo("anna/d", repo_type="dataset")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("anna/d", repo_type="dataset")


def test_a_private_repo_hides_from_strangers(hub: Hub, api: HfApi) -> None:
    api.create_repo("anna/secret", private=True)
    assert api.repo_info("anna/secret").private
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=False).repo_info("anna/secret")


def test_one_commit_of_large_and_small_files(
    hub: Hub, api: HfApi, weights: bytes, tmp_path: Path
) -> None:
    source = tmp_path / "w"
    source.write_bytes(weights)
    operations = [
        CommitOperationAdd(WEIGHTS, source),
        CommitOperationAdd("state.json", b"{}"),
        CommitOperationAdd("log/w-01.jsonl", b"{}\n"),
    ]
    commit = api.create_commit(REPO, operations, commit_message="first", revision="main")
    kinds = [r["kind"] for r in hub.log()]
    assert kinds == ["preupload", "batch", "put", "verify", "commit"]
    api.create_tag(REPO, tag="v1")
    for revision in (commit.oid, "main", "v1"):
        assert hashlib.sha256(read(api, WEIGHTS, revision)).digest() == (
            hashlib.sha256(weights).digest()
        )
        assert read(api, "state.json", revision) == b"{}"
    assert not any(r["authorized"] for r in hub.log() if r["origin"] == "blob")


def test_a_stale_parent_is_refused(hub: Hub, api: HfApi) -> None:
    first = put(api, "state.json", b"1")
    second = put(api, "state.json", b"2", parent_commit=first)
    with pytest.raises(HfHubHTTPError) as error:
        put(api, "state.json", b"3", parent_commit=first)
    assert status_of(error) == 412
    assert "A commit has happened since" in str(error.value)
    assert put(api, "state.json", b"3", parent_commit=second[:7])
    assert read(api, "state.json", "main") == b"3"


def test_unchanged_bytes_pass_for_a_commit_whatever_the_parent(hub: Hub, api: HfApi) -> None:
    """Why every publish carries a nonce: the client never sends this commit at all."""
    first = put(api, "state.json", b"1")
    head = put(api, "other", b"2")
    hub.clear_log()
    assert put(api, "state.json", b"1", parent_commit=first) == head
    assert hub.count("commit") == 0


def test_a_preuploaded_commit_is_one_request_a_try(hub: Hub, api: HfApi, weights: bytes) -> None:
    stale = put(api, "state.json", b"1")
    head = put(api, "state.json", b"2")
    operations = [CommitOperationAdd(WEIGHTS, weights)]
    api.preupload_lfs_files(REPO, operations, free_memory=False)
    hub.clear_log()
    with pytest.raises(HfHubHTTPError):
        api.create_commit(REPO, operations, commit_message="x", parent_commit=stale)
    api.create_commit(REPO, operations, commit_message="x", parent_commit=head)
    assert [(r["kind"], r["status"]) for r in hub.log()] == [("commit", 412), ("commit", 200)]


def test_tree_and_paths_info(hub: Hub, api: HfApi, weights: bytes) -> None:
    first = put(api, WEIGHTS, weights)
    put(api, "a/b/c.txt", b"deep")
    top = list(api.list_repo_tree(REPO))
    assert {e.path for e in top if isinstance(e, RepoFolder)} == {"a", "weights"}
    assert [e.path for e in api.list_repo_tree(REPO, "a", recursive=True)] == ["a/b", "a/b/c.txt"]
    [file] = api.get_paths_info(REPO, [WEIGHTS, "absent"], expand=True)
    assert isinstance(file, RepoFile)
    assert file.size == len(weights)
    assert file.lfs is not None
    assert file.lfs.sha256 == hashlib.sha256(weights).hexdigest()
    assert file.last_commit is not None
    assert (file.last_commit.oid, file.last_commit.title) == (first, f"put {WEIGHTS}")
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "absent"))


def test_commits_come_newest_first_and_in_pages(hub: Hub, api: HfApi) -> None:
    oids = [put(api, "n", str(n).encode()) for n in range(60)]
    listed = [c.commit_id for c in api.list_repo_commits(REPO)]
    assert listed[:60] == oids[::-1]
    assert len(listed) == 61
    assert hub.count("commits") == 2
    info = api.repo_info(REPO)
    assert info.sha == oids[-1]
    assert info.last_modified is not None


def test_branches_and_tags(hub: Hub, api: HfApi) -> None:
    first = put(api, "n", b"1")
    api.create_branch(REPO, branch="workers/w01", revision=first)
    mine = put(api, "n", b"mine", revision="workers/w01")
    main = put(api, "n", b"2", parent_commit=first)
    api.create_tag(REPO, tag="round/7", revision=mine)
    refs = api.list_repo_refs(REPO)
    assert {b.name: b.target_commit for b in refs.branches} == {"main": main, "workers/w01": mine}
    assert [(t.name, t.target_commit) for t in refs.tags] == [("round/7", mine)]
    for create in (
        lambda: api.create_branch(REPO, branch="workers/w01"),
        lambda: api.create_tag(REPO, tag="round/7"),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            create()
        assert status_of(error) == 409
    with pytest.raises(RevisionNotFoundError):
        api.create_branch(REPO, branch="x", revision="f" * 40)
    api.delete_branch(REPO, branch="workers/w01")
    assert read(api, "n", "round/7") == b"mine"
    api.delete_tag(REPO, tag="round/7")
    with pytest.raises(RevisionNotFoundError):
        put(api, "n", b"3", revision="workers/w01")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(REPO, revision=mine)


def test_pull_request(hub: Hub, api: HfApi) -> None:
    head = put(api, "n", b"1")
    add = [CommitOperationAdd("n", b"2")]
    commit = api.create_commit(REPO, add, commit_message="please", create_pr=True)
    assert commit.pr_revision == "refs/pr/1"
    assert read(api, "n", "refs/pr/1") == b"2"
    assert api.repo_info(REPO).sha == head


def test_copy_and_delete(hub: Hub, api: HfApi, weights: bytes) -> None:
    put(api, WEIGHTS, weights)
    put(api, "log/a", b"a")
    operations = [
        CommitOperationCopy(WEIGHTS, "round/1.safetensors"),
        CommitOperationCopy("log/a", "b"),
        CommitOperationDelete("log/"),
    ]
    hub.clear_log()
    api.create_commit(REPO, operations, commit_message="move")
    assert hub.count("put") == 0
    assert read(api, "round/1.safetensors", "main") == weights
    assert read(api, "b", "main") == b"a"
    assert not api.file_exists(REPO, "log/a")
    with pytest.raises(EntryNotFoundError):
        api.create_commit(REPO, [CommitOperationDelete("log/a")], commit_message="again")


def test_a_pointer_to_nothing_is_refused(hub: Hub, api: HfApi, weights: bytes) -> None:
    operations = [CommitOperationAdd(WEIGHTS, weights)]
    api.preupload_lfs_files(REPO, operations, free_memory=False)
    hub.forget_object(hashlib.sha256(weights).hexdigest())
    with pytest.raises(BadRequestError, match="does not exist"):
        api.create_commit(REPO, operations, commit_message="x")


def test_squash(hub: Hub, api: HfApi) -> None:
    first = put(api, "n", b"1")
    old = put(api, "n", b"2")
    api.create_tag(REPO, tag="kept", revision=first)
    api.super_squash_history(REPO, branch="main", commit_message="squashed")
    assert [c.title for c in api.list_repo_commits(REPO)] == ["squashed"]
    assert read(api, "n", "main") == b"2"
    assert read(api, "n", "kept") == b"1"
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(REPO, revision=old)
    with pytest.raises(HfHubHTTPError) as error:
        put(api, "n", b"3", parent_commit=old)
    assert status_of(error) == 412


def test_lfs_files_outlive_their_commits_until_deleted(hub: Hub, api: HfApi) -> None:
    put(api, "w.safetensors", b"old" * 100)
    put(api, "w.safetensors", b"new" * 100)
    api.super_squash_history(REPO)
    files = {f.file_oid: f for f in api.list_lfs_files(REPO)}
    old, new = (hashlib.sha256(x * 100).hexdigest() for x in (b"old", b"new"))
    assert set(files) == {old, new}
    assert (files[new].filename, files[new].size) == ("w.safetensors", 300)
    api.permanently_delete_lfs_files(REPO, [files[old]])
    assert [f.file_oid for f in api.list_lfs_files(REPO)] == [new]
    assert read(api, "w.safetensors", "main") == b"new" * 100


def test_file_system_reads_ranges(hub: Hub, api: HfApi, weights: bytes) -> None:
    oid = put(api, WEIGHTS, weights)
    put(api, WEIGHTS, b"another")
    hub.clear_log()
    fs = HfFileSystem(endpoint=hub.url, token="hf_anna", skip_instance_cache=True)
    with fs.open(f"{REPO}@{oid}/{WEIGHTS}", block_size=1 << 16) as f:
        f.seek(3_000_000)
        assert f.read(1000) == weights[3_000_000:3_001_000]
    assert {r["kind"] for r in hub.log()} >= {"resolve", "blob"}
    assert fs.cat_file(f"{REPO}@{oid}/{WEIGHTS}", start=-4) == weights[-4:]


def test_snapshot_download(hub: Hub, api: HfApi, weights: bytes, tmp_path: Path) -> None:
    put(api, WEIGHTS, weights)
    put(api, "state.json", b"{}")
    folder = Path(
        snapshot_download(REPO, endpoint=hub.url, token="hf_anna", local_dir=tmp_path / "copy")
    )
    assert (folder / WEIGHTS).read_bytes() == weights
    assert (folder / "state.json").read_bytes() == b"{}"


def test_multipart_upload_in_four_parts(hub: Hub, api: HfApi, weights: bytes) -> None:
    hub.configure(part_bytes=1_600_000)
    put(api, WEIGHTS, weights)
    assert [r["path"][-2:] for r in hub.log("put_part")] == ["/1", "/2", "/3", "/4"]
    assert hub.count("put") == 0
    assert hub.count("complete") == 1
    assert read(api, WEIGHTS, "main") == weights


def test_who_am_i(hub: Hub) -> None:
    account = HfApi(endpoint=hub.url, token="hf_anna").whoami()
    assert account["name"] == "anna"
    assert account["auth"]["accessToken"]["role"] == "write"
    with pytest.raises(HfHubHTTPError) as error:
        HfApi(endpoint=hub.url, token="not-ours").whoami()
    assert status_of(error) == 401


def test_a_read_only_token_reads_and_does_not_write(hub: Hub, api: HfApi) -> None:
    put(api, "n", b"1")
    reader = HfApi(endpoint=hub.url, token="hf_ro_anna")
    assert reader.whoami()["auth"]["accessToken"]["role"] == "read"
    assert reader.list_repo_files(REPO) == [".gitattributes", "n"]
    with pytest.raises(HfHubHTTPError) as error:
        put(reader, "n", b"2")
    assert status_of(error) == 403
