"""Data sets on a hub, through the test hub and its two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants

from diffurefill.config import UserError
from diffurefill.data.storage import hub_files
from diffurefill.data.storage.files import list_files, open_file, pinned
from diffurefill.data.storage.http import close_client
from diffurefill.data.storage.hub_files import Address, parse
from diffurefill.data.storage.remote import open_remote
from tests.data.range_server import Refusal, serve
from tests.data.storage.test_patience import FakeTime
from tests.hub_server import Hub, hub_environment, read, running_hub

REPO = "anna/texts"
HERE = f"hf://datasets/{REPO}"
PARQUET = bytes(range(256)) * 8000
FILES = {
    "README.md": b"the card",
    "en/train-00000-of-00002.parquet": PARQUET,
    "en/train-00001-of-00002.parquet": PARQUET[::-1],
    "en/test-00000-of-00001.parquet": b"PAR1",
    "more/a.jsonl": b'{"text": "a"}\n',
    "more/b.txt": b"b",
    "more/image [1].png": b"png",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(tmp_path) as hub:
        hub_environment(monkeypatch, hub, tmp_path / "home", token="hf_anna")
        close_client()
        yield hub
        close_client()
        huggingface_hub.close_session()


@pytest.fixture
def api(hub: Hub) -> HfApi:
    """The data set `anna/texts` exists."""
    api = HfApi(endpoint=hub.url, token="hf_anna")
    api.create_repo(REPO, repo_type="dataset", private=True)
    upload(api, FILES)
    hub.clear_log()
    return api


def upload(api: HfApi, files: dict[str, bytes]) -> str:
    """The commit."""
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    return api.create_commit(REPO, operations, commit_message="x", repo_type="dataset").oid


def head(api: HfApi) -> str:
    sha = api.dataset_info(REPO).sha
    assert sha is not None
    return sha


def names(address: str) -> list[str]:
    return [file.name for file in list_files(address)]


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        (HERE, Address(REPO, None, "")),
        (f"{HERE}/", Address(REPO, None, "")),
        (f"{HERE}@v1/en/*.parquet", Address(REPO, "v1", "en/*.parquet")),
        (f"{HERE}/a@b/c", Address(REPO, None, "a@b/c")),
        (f"{HERE}@refs/convert/parquet/en", Address(REPO, "refs/convert/parquet", "en")),
        (f"{HERE}@refs/pr/12", Address(REPO, "refs/pr/12", "")),
        (f"{HERE}@my%2Fbranch/x", Address(REPO, "my/branch", "x")),
        (f"{HERE}@~parquet/en", Address(REPO, "refs/convert/parquet", "en")),
    ],
)
def test_the_parts_of_an_address(address: str, parsed: Address) -> None:
    assert parse(address) == parsed
    assert parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "address", ["hf://anna/texts", "hf://datasets/texts", "hf://datasets/a b/c"]
)
def test_an_address_of_another_shape_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"write a data set of the hub as hf://datasets/owner/name"):
        parse(address)


# --- listing and pinning -------------------------------------------------------------------------


def test_a_data_set_s_files_are_its_train_split_and_not_its_card(api: HfApi) -> None:
    files = list_files(HERE)
    assert [(file.name, file.size) for file in files] == [
        ("en/train-00000-of-00002.parquet", len(PARQUET)),
        ("en/train-00001-of-00002.parquet", len(PARQUET)),
        ("more/a.jsonl", 14),
        ("more/b.txt", 1),
    ]
    assert [file.uri for file in files] == [f"{HERE}@{head(api)}/{file.name}" for file in files]


def test_a_part_of_a_data_set(api: HfApi) -> None:
    train = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    for path, found in {
        "en": train,
        "en/": train,
        "en/test-00000-of-00001.parquet": ["test-00000-of-00001.parquet"],
        "README.md": ["README.md"],
        "en/*-00000-*": ["test-00000-of-00001.parquet", train[0]],
        "*/[ab].*": ["more/a.jsonl", "more/b.txt"],
        "m*": ["more/a.jsonl", "more/b.txt"],
        "more/image [1].png": ["image [1].png"],
    }.items():
        assert names(f"{HERE}/{path}") == found
        assert names(f"{HERE}@{head(api)}/{path}") == found


def test_more_files_than_fit_a_page(api: HfApi, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read.page
    monkeypatch.setattr(read, "page", lambda state, ask, items, _: page(state, ask, items, 2))
    assert names(f"{HERE}/en") == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert hub.count("tree") == 2
    assert all(record["authorized"] for record in hub.log("tree"))


def test_a_path_that_is_not_there(api: HfApi) -> None:
    for path, message in {
        "nothing": "no such file or folder: hf://datasets/anna/texts/nothing",
        "nothing/*.txt": "no file matches the data source",
        "en/*.jsonl": "no file matches the data source",
    }.items():
        with pytest.raises(UserError, match=message):
            list_files(f"{HERE}/{path}")


def test_a_branch_is_pinned_to_the_commit_it_points_to(api: HfApi, hub: Hub) -> None:
    first = head(api)
    api.create_branch(REPO, branch="old/one", repo_type="dataset")
    second = upload(api, {"more/a.jsonl": b'{"text": "new"}\n'})
    assert pinned(f"{HERE}/more/*.jsonl") == f"{HERE}@{second}/more/*.jsonl"
    assert pinned(HERE) == f"{HERE}@{second}"
    assert pinned(f"{HERE}@old%2Fone/more") == f"{HERE}@{first}/more"
    hub.clear_log()
    assert pinned(f"{HERE}@{first}/more") == f"{HERE}@{first}/more"
    assert hub.log() == []


def test_a_listed_file_stays_what_it_was_when_the_branch_moves(api: HfApi) -> None:
    (file,) = list_files(f"{HERE}/more/a.jsonl")
    upload(api, {"more/a.jsonl": b"other"})
    assert open_file(file.uri).read_at(0, 100) == FILES["more/a.jsonl"]


# --- reading -------------------------------------------------------------------------------------


def test_large_and_small_files_are_read(api: HfApi) -> None:
    for path in ("en/train-00000-of-00002.parquet", "more/a.jsonl", "README.md"):
        file, content = open_file(f"{HERE}@main/{path}"), FILES[path]
        assert file.size == len(content)
        assert file.read_at(0, 1000) == content[:1000]
        assert file.read_at(len(content) - 5, 9) == content[-5:]
        assert file.read_at(7, len(content)) == content[7:]


def test_the_login_does_not_reach_the_host_of_the_bytes(api: HfApi, hub: Hub) -> None:
    file = open_file(f"{HERE}/en/train-00000-of-00002.parquet")
    file.read_at(0, 100)
    resolved, fetched = hub.log("resolve"), hub.log("blob")
    assert all(record["authorized"] for record in resolved)
    assert not any(record["authorized"] for record in fetched)
    # Each range is resolved anew: what a redirect signs is good for an hour.
    assert len(resolved) == len(fetched) == 2


def test_trouble_at_either_host_passes(api: HfApi, hub: Hub) -> None:
    time = FakeTime()
    hub.faults.add("resolve", "rate_limited", seconds=30)
    hub.faults.add("resolve", "error", status=503, skip=1)
    hub.faults.add("blob", "cut")
    hub.faults.add("blob", "forbidden")
    file = open_remote(f"{HERE}/en/train-00000-of-00002.parquet", time.patience)
    assert file.read_at(0, file.size) == PARQUET
    assert len(time.slept) == 4
    assert time.slept[0] == 31.0


def test_trouble_in_a_listing_passes_or_ends_within_a_minute(
    api: HfApi, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = FakeTime(hub_files.LISTING.budget_seconds)
    monkeypatch.setattr(hub_files, "LISTING", time.patience)
    for kind in ("info", "tree", "paths_info"):
        hub.faults.add(kind, "error", status=502)
    assert names(f"{HERE}/more") == ["a.jsonl", "b.txt"]
    assert len(time.slept) == 3
    hub.faults.add("tree", "error", status=502, times=None)
    with pytest.raises(UserError, match=r"anna/texts@.* cannot be reached: .* in 1 min failed"):
        list_files(HERE)


def test_a_hub_that_answers_with_a_page_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime(60.0)
    monkeypatch.setattr(hub_files, "LISTING", time.patience)
    with serve({f"api/datasets/{REPO}": b"<html>Log in to the wireless network"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(UserError, match="the answer is not the hub's"):
            pinned(HERE)


# --- refusals ------------------------------------------------------------------------------------


def test_what_is_not_there_is_named(api: HfApi) -> None:
    for address, message in {
        "hf://datasets/anna/nothing": "no data set anna/nothing on the hub, or your account may",
        f"{HERE}@nowhere/en": "anna/texts has no branch, tag or commit 'nowhere'",
    }.items():
        for ask in (list_files, pinned):
            with pytest.raises(UserError, match=message):
                ask(address)


def test_a_private_data_set_needs_a_login(api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"may not read it: .* log in with `hf auth login`"):
        pinned(HERE)


def test_a_wrong_token_is_in_no_message(api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    for ask in (pinned, list_files, lambda address: open_file(f"{address}/README.md")):
        with pytest.raises(UserError, match="log in with") as caught:
            ask(HERE)
        assert "secret" not in str(caught.value)


def test_a_file_that_is_not_in_the_commit(api: HfApi) -> None:
    with pytest.raises(
        UserError, match=r"anna/texts/gone\.txt: no such file or folder in the data"
    ):
        open_file(f"{HERE}/gone.txt")


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            Refusal(403, {"X-Error-Code": "GatedRepo"}),
            "accept the conditions at .*/datasets/anna/t",
        ),
        (
            Refusal(401, {"X-Error-Code": "GatedRepo"}),
            "accept the conditions at .*/datasets/anna/t",
        ),
        (Refusal(401), "no data set anna/texts on the hub, or your account may not read it"),
        (Refusal(403), "the hub refused the login"),
        (Refusal(418), "the hub answered 418: check the address"),
    ],
)
def test_refusals_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve({}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for ask in (pinned, list_files, open_file):
            server.next_faults.append(refusal)
            with pytest.raises(UserError, match=message) as caught:
                ask(f"{HERE}/a.txt")
            assert "hf_secret" not in str(caught.value)
        assert len(server.requests) == 3
    close_client()


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ask in (pinned, list_files, open_file):
        with pytest.raises(UserError, match="HF_HUB_OFFLINE is set; unset it"):
            ask(f"{HERE}/a.txt")
