"""What is particular to a model repository: branches, commits, quotas, squashes, tokens."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from diffurefill.config import UserError
from diffurefill.store.base import (
    Busy,
    Conflict,
    Corrupt,
    Denied,
    NotFound,
    Ref,
    Version,
    open_store,
    require_free,
)
from diffurefill.store.hub import HubStore
from diffurefill.store.hub_files import MANIFEST, REGULAR_BYTES, Known, decode, encode
from diffurefill.store.hub_repo import START_TAG
from tests.hub_server import Hub, environment
from tests.store import writers
from tests.store.hub_helpers import REPO, URI, files, kinds, opened, staged

ROOT = Path(__file__).resolve().parents[2]


# --- opening, tokens ---


def test_a_missing_repository_says_how_to_make_a_run(hub: Hub) -> None:
    with pytest.raises(UserError, match=r"no run at hf://alice/run: make one with `diffurefill in"):
        open_store(URI)


@pytest.mark.parametrize(
    "uri", ["hf://alice/run@main", "hf://alice", "hf://datasets/a/b", "hf://", "hf://a..b/-c"]
)
def test_an_address_of_no_model_repository_is_refused(hub: Hub, uri: str) -> None:
    with pytest.raises(UserError, match="hf://"):
        open_store(uri)


def test_an_endpoint_without_a_scheme_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "my.hub.example")
    with pytest.raises(Denied, match="HF_ENDPOINT must begin"):
        opened()


def test_a_run_is_made_private_and_opened_again(hub: Hub) -> None:
    made = open_store(URI, create=True)
    first = made.publish("main", {"a": b"1"}, expect=None)
    assert HfApi(endpoint=hub.url).model_info(REPO).private
    assert open_store(URI, create=True).head() == first
    assert open_store(URI).head() == first


def upload(hub: Hub, path: str, branch: str = "main") -> None:
    """A file that a person keeps in the repository."""
    api = HfApi(endpoint=hub.url, token="hf_alice")
    api.create_repo(REPO, exist_ok=True)
    api.create_branch(REPO, branch=branch, exist_ok=True)
    api.upload_file(path_or_fileobj=b"mine", path_in_repo=path, repo_id=REPO, revision=branch)


@pytest.mark.parametrize("path", ["tokenizer.json", "model.safetensors"])
def test_the_files_of_another_model_are_not_written_over(hub: Hub, path: str) -> None:
    upload(hub, path)
    for act in (
        lambda: open_store(URI, create=True),
        lambda: opened().publish("main", {"tokenizer.json": b"{}"}, expect=None),
    ):
        with pytest.raises(UserError, match=f"{path} on branch main .* repository of its own"):
            act()
    assert files(hub, "main") == {path}


def test_what_is_in_the_way_of_a_run_is_told_before_it_is_made(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_free(URI)
    assert "create_repo" not in kinds(hub)
    with monkeypatch.context() as patch:
        patch.delenv("HF_TOKEN")
        with pytest.raises(Denied, match="no token"):
            require_free(URI)
        patch.setenv("HF_TOKEN", "hf_ro_alice")
        with pytest.raises(Denied, match="read-only"):
            require_free(URI)
    upload(hub, "tokenizer.json")
    with pytest.raises(UserError, match="repository of its own"):
        require_free(URI)


def test_a_worker_does_not_write_over_a_branch_that_a_person_made(
    hub: Hub, hub_store: HubStore
) -> None:
    upload(hub, "notes.txt", "w-00")
    with pytest.raises(UserError, match=r"notes.txt on branch w-00"):
        hub_store.publish("w-00", {"reg": b"1"}, expect=None)


def test_a_run_may_be_made_in_a_repository_with_a_readme(hub: Hub) -> None:
    upload(hub, "README.md")
    store = open_store(URI, create=True)
    store.publish("main", {"a": b"1"}, expect=None)
    store.publish("w-00", {"a": b"1"}, expect=None)


def test_access_is_checked_at_once_and_cheaply(hub: Hub, hub_store: HubStore) -> None:
    hub.clear_log()
    hub_store.check_access()
    hub_store.check_access()
    assert kinds(hub) == ["whoami", "auth_check", "auth_check"]


def test_a_read_only_token_is_denied_before_any_work(
    hub: Hub, hub_store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ro_alice")
    reader = opened()
    assert reader.head() is None
    with pytest.raises(Denied, match="read-only: set HF_TOKEN"):
        reader.check_access()
    with pytest.raises(Denied, match="HF_TOKEN"):
        reader.publish("main", {"a": b"1"}, expect=None)


def test_a_token_that_may_not_write_to_this_repository_is_denied(
    hub: Hub, hub_store: HubStore
) -> None:
    """A fine-grained token: it may write, but elsewhere. Otherwise every commit would be 412."""
    hub.faults.add("auth_check", "forbidden")
    with pytest.raises(Denied, match="HF_TOKEN"):
        hub_store.check_access()


def test_a_hub_without_that_question_is_believed(hub: Hub, hub_store: HubStore) -> None:
    hub.faults.add("auth_check", "error", status=404)
    hub_store.check_access()


def test_without_a_token_nothing_can_be_written(
    hub: Hub, hub_store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="set HF_TOKEN"):  # a private repository is not to be seen
        opened()
    HfApi(endpoint=hub.url, token="hf_alice").create_repo("public", private=False)
    with pytest.raises(Denied, match="no token"):
        HubStore("hf://alice/public", create=False).check_access()


SECRET = "hf_ro_verysecret"


@pytest.mark.parametrize(
    ("token", "act"),
    [
        ("verysecret", lambda: opened()),
        (SECRET, lambda: opened().check_access()),
        (SECRET, lambda: opened().publish("main", {"a": b"1"}, expect=None)),
        (SECRET, lambda: HubStore("hf://verysecrets/run", create=True)),
    ],
)
def test_a_token_is_in_no_message(
    hub: Hub,
    hub_store: HubStore,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    act: Callable[[], object],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(Denied, match="HF_TOKEN") as caught:
        act()
    assert token not in "".join(traceback.format_exception(caught.value, limit=0))


# --- publishing ---


def test_a_publish_is_one_commit_request_and_uploads_nothing(
    hub: Hub, hub_store: HubStore, tmp_path: Path
) -> None:
    first = hub_store.publish("main", {"a": b"1"}, expect=None)
    hub.clear_log()
    ref = staged(hub_store, tmp_path, b"weights")
    assert kinds(hub) == ["batch", "put", "verify"]
    hub.clear_log()
    changes = {"global_b.safetensors": ref, "state.json": b"{}", "a": None}
    second = hub_store.publish("main", changes, expect=first)
    assert kinds(hub) == ["commit"]
    assert opened().head() == second
    assert files(hub, "main") == {"global_b.safetensors", "state.json"}


def test_text_lies_in_git_and_everything_else_does_not(
    hub: Hub, hub_store: HubStore, tmp_path: Path
) -> None:
    changes = {
        "text": "naïve\n".encode(),
        "empty": b"",
        "nul": b"\0",
        "binary": b"\xff",
        "long": b"x" * (REGULAR_BYTES + 1),
        "staged": staged(hub_store, tmp_path, b"text"),
    }
    version = hub_store.publish("main", changes, expect=None)
    tree = {
        file.path: file.lfs is not None  # type: ignore[union-attr]
        for file in HfApi(endpoint=hub.url).list_repo_tree(REPO, revision=version.id)
    }
    assert {path for path in version.files if not tree[path]} == {"text", "empty"}
    assert all(len(opened().read(ref)) == ref.size for ref in opened().head().files.values())


@pytest.mark.parametrize("path", [MANIFEST, ".gitattributes", ".git/config", "a/.cache/b"])
def test_a_path_of_the_store_or_of_git_is_refused(hub_store: HubStore, path: str) -> None:
    with pytest.raises(UserError, match="taken"):
        hub_store.publish("main", {path: b"1"}, expect=None)


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"w" * (REGULAR_BYTES + 1)])
def test_a_restarted_process_publishes_an_old_file_without_its_bytes(
    hub: Hub, hub_store: HubStore, tmp_path: Path, content: bytes
) -> None:
    """A rollback names the weights of an older version, of any lane."""
    ref = staged(hub_store, tmp_path, content)
    (tmp_path / "source").unlink()
    first = hub_store.publish("main", {"weights": ref}, expect=None)
    hub_store.publish("main", {"weights": None}, expect=first)
    restarted = opened()
    versions = list(restarted.history("main"))
    hub.clear_log()
    third = restarted.publish("main", {"weights": ref}, expect=versions[-1])
    worker = restarted.publish("w-00", {"base": ref}, expect=None)
    assert not {"batch", "put", "preupload"} & set(kinds(hub))
    assert opened().read(third.ref("weights")) == content
    assert opened().read(worker.ref("base")) == content


def test_a_staged_file_outlives_its_process(hub: Hub, hub_store: HubStore, tmp_path: Path) -> None:
    ref = staged(hub_store, tmp_path, b"staged, then preempted")
    version = opened().publish("main", {"a": ref}, expect=None)
    assert opened().read(version.ref("a")) == b"staged, then preempted"


def test_a_file_that_the_hub_lost_is_not_found(
    hub: Hub, hub_store: HubStore, tmp_path: Path
) -> None:
    ref = staged(hub_store, tmp_path, b"collected before it was committed")
    (tmp_path / "source").unlink()
    hub.forget_object(ref.sha256)
    with pytest.raises(NotFound, match="LFS pointer"):
        hub_store.publish("main", {"a": ref}, expect=None)
    with pytest.raises(NotFound):
        hub_store.read(ref)


# --- lanes ---


def test_a_new_lane_holds_its_own_files_only(hub: Hub, hub_store: HubStore) -> None:
    main = hub_store.publish("main", {"global": b"1"}, expect=None)
    hub_store.compact("main", hub_store.publish("main", {"global": b"2"}, expect=main))
    hub_store.publish("w-00", {"ckpt": b"1"}, expect=None)
    assert files(hub, "w-00") == {"ckpt"}
    assert len(list(opened().history("w-00"))) == 1


def test_a_new_lane_leaves_behind_what_its_branch_started_from(
    hub: Hub, hub_store: HubStore
) -> None:
    """A repository made by hand has no tag, and after a squash main is all there is."""
    main = hub_store.publish("main", {"global": b"1", "both": b"1"}, expect=None)
    api = HfApi(endpoint=hub.url)
    api.delete_tag(REPO, tag=START_TAG)
    hub_store.compact("main", main)
    other = opened()
    first = other.publish("w-00", {"ckpt": b"1", "both": b"2"}, expect=None)
    assert files(hub, "w-00") == {"ckpt", "both"}
    assert list(opened().history("w-00")) == [first]
    assert other.read(first.ref("both")) == b"2"


def test_a_branch_is_no_lane_before_its_first_version(hub: Hub, hub_store: HubStore) -> None:
    hub_store.publish("main", {"a": b"1"}, expect=None)
    HfApi(endpoint=hub.url).create_branch(REPO, branch="w-00", revision="main")
    assert hub_store.lanes() == ["main"]
    assert hub_store.head("w-00") is None
    first = hub_store.publish("w-00", {"b": b"1"}, expect=None)
    assert hub_store.head("w-00") == first
    assert files(hub, "w-00") == {"b"}


def test_of_several_makers_of_a_lane_exactly_one_wins(hub: Hub, hub_store: HubStore) -> None:
    stores = [opened() for _ in range(4)]
    together = threading.Barrier(4, timeout=30)

    def make(store: HubStore) -> Version | None:
        together.wait()
        try:
            return store.publish("w-00", {"a": b"1"}, expect=None)
        except Conflict:
            return None

    with ThreadPoolExecutor(4) as pool:
        made = [version for version in pool.map(make, stores) if version]
    assert made == [hub_store.head("w-00")]


def test_a_commit_made_by_hand_moves_the_version_and_adds_none(
    hub: Hub, hub_store: HubStore
) -> None:
    first = hub_store.publish("main", {"a": b"1"}, expect=None)
    readme = CommitOperationAdd("README.md", b"# A run\n")
    HfApi(endpoint=hub.url).create_commit(REPO, [readme], commit_message="Describe the run")
    with pytest.raises(Conflict):
        hub_store.publish("main", {"a": b"2"}, expect=first)
    head = hub_store.head()
    assert head is not None
    assert (head.nonce, head.files) == (first.nonce, first.files)
    assert list(opened().history("main")) == [head]
    hub_store.publish("main", {"a": b"2"}, expect=head)
    assert "README.md" in files(hub, "main")


# --- what it costs ---


def test_polling_all_lanes_is_one_request(hub: Hub, hub_store: HubStore) -> None:
    lanes = ["main", "w-00", "w-01"]
    for lane in lanes[:2]:
        hub_store.publish(lane, {"a": b"1"}, expect=None)
    watcher = opened()
    watcher.poll(lanes)
    hub.clear_log()
    heads = watcher.poll(lanes)
    assert kinds(hub) == ["refs"]
    assert watcher.head("w-00") == hub_store.head("w-00")
    assert (heads["w-00"], heads["w-01"]) == (hub_store.head("w-00").id, None)


def test_a_lookup_opens_no_manifest_but_the_one_it_finds(hub: Hub, hub_store: HubStore) -> None:
    versions: list[Version | None] = [None]
    for i in range(6):
        versions.append(hub_store.publish("main", {"a": b"%d" % i}, expect=versions[-1]))
    searcher = opened()
    hub.clear_log()
    assert searcher.lookup("main", versions[2].nonce) == versions[2]
    assert sorted(kinds(hub)) == ["commits", "refs", "resolve", "resolve"]  # the head's, and it
    assert searcher.lookup("main", "never") is None


def test_commits_have_a_limit_by_the_hour(hub: Hub, hub_store: HubStore) -> None:
    now = [1000.0]
    store = HubStore(URI, create=False, commits_per_hour=2, clock=lambda: now[0])
    first = store.publish("main", {"a": b"1"}, expect=None)
    now[0] += 600
    second = store.publish("main", {"a": b"2"}, expect=first)
    hub.clear_log()
    with pytest.raises(Busy) as busy:
        store.publish("main", {"a": b"3"}, expect=second)
    assert busy.value.retry_after == 3000.0
    assert hub.count("commit") == 0
    now[0] += busy.value.retry_after
    third = store.publish("main", {"a": b"3"}, expect=second)
    with pytest.raises(Busy):  # a squash is a commit too
        store.compact("main", third)


def test_the_selftest_costs_few_commits_and_leaves_no_branch(hub: Hub, hub_store: HubStore) -> None:
    hub.clear_log()
    hub_store.selftest()
    assert hub.count("commit") <= 8
    assert HfApi(endpoint=hub.url).list_repo_refs(REPO).branches[0].name == "main"
    assert len(HfApi(endpoint=hub.url).list_repo_refs(REPO).branches) == 1


# --- processes ---


def test_racing_processes_lose_no_update(hub: Hub, hub_store: HubStore, tmp_path: Path) -> None:
    processes = []
    for i in range(6):
        variables = environment(hub, tmp_path / f"home{i}", token="hf_alice")
        command = [sys.executable, "-m", "tests.store.writers", URI, f"p{i}", "2"]
        processes.append(subprocess.Popen(command, cwd=ROOT, env={"PATH": "", **variables}))
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0] * 6
    assert writers.count(hub_store) == 12
    versions = list(hub_store.history(writers.LANE))
    assert len(versions) == 12
    assert versions[-1] == hub_store.head(writers.LANE)


# --- the manifest ---


def test_a_manifest_comes_back_as_it_was_written() -> None:
    version = Version("main", "0" * 40, "nonce", {"a": Ref("f" * 64, 3)})
    known = Known(version, 7, "1" * 40)
    content = encode(known)
    assert decode(content, version.id) == known
    for damaged in (content.replace(b'"size": 3', b'"size": 4'), content[:-3], b"[]", b"{}"):
        with pytest.raises(Corrupt, match="not a manifest"):
            decode(damaged, version.id)
