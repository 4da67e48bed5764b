"""To a hub and back: one commit, the same bytes, nothing of others overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi

from diffurefill.cli import main
from diffurefill.config import UserError
from diffurefill.fleet import exported as layout
from diffurefill.fleet.loading import load
from diffurefill.release.publish import Destination
from tests.hub_server import Hub, hub_environment, running_hub
from tests.release.card import results
from tests.release.runs import tiny_run

REPO, URI = "alice/model", "hf://alice/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(tmp_path) as hub:
        hub_environment(monkeypatch, hub, tmp_path / "home", token="hf_alice")
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token="hf_alice")


def test_a_model_goes_to_the_hub_in_one_commit_and_comes_back(
    run: str, exported: Path, hub: Hub, api: HfApi, unopened: None
) -> None:
    assert main(["export", run, "--to", URI]) == 0
    assert hub.count("commit") == 1
    assert api.repo_info(REPO).private
    for name in (REPO, URI, f"{URI}@main"):
        back = load(name)
    for name, tensor in load(str(exported)).denoiser.state_dict().items():
        assert torch.equal(tensor, back.denoiser.state_dict()[name])
    assert {path.name for path in exported.iterdir()} <= set(api.list_repo_files(REPO))


def test_what_is_there_is_replaced_only_when_asked_and_others_files_stay(
    run: str, hub: Hub, api: HfApi, unopened: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", run, "--to", URI, "--public"]) == 0
    assert not api.repo_info(REPO).private
    mine = ["README.md", ".eval_results/x.yaml"]
    for path in mine:
        api.upload_file(path_or_fileobj=b"mine", path_in_repo=path, repo_id=REPO)
    commits = hub.count("commit")
    assert main(["export", run, "--weights", "swa", "--to", URI]) == 2
    assert "add --replace" in capsys.readouterr().err
    assert hub.count("commit") == commits
    assert main(["export", run, "--weights", "swa", "--to", URI, "--replace"]) == 0
    assert set(mine) <= set(api.list_repo_files(REPO))
    swa, back = load(run, "swa"), load(REPO)
    for name, tensor in swa.denoiser.state_dict().items():
        assert torch.equal(tensor, back.denoiser.state_dict()[name])


def test_an_export_s_card_and_pick_go_along_to_the_hub_and_back(
    exported: Path, tmp_path: Path, hub: Hub, api: HfApi, unopened: None
) -> None:
    folder, back = tmp_path / "model", tmp_path / "back"
    shutil.copytree(exported, folder)
    (folder / "pick.json").write_text("{}")
    run_id = json.loads((folder / "provenance.json").read_text())["source"]["run_id"]
    results.source(tmp_path, "log.jsonl", results.progress_lines(4).replace(results.RUN, run_id))
    log = ["--results", str(tmp_path / "log.jsonl"), "--license", "mit"]
    assert main(["card", str(folder), *log, "--name", "Small"]) == 0
    card = (folder / "README.md").read_text()
    assert main(["export", str(folder), "--to", URI]) == 0
    assert main(["export", URI, "--to", str(back)]) == 0
    there = card.replace('from_pretrained(".",', f'from_pretrained("{REPO}",')
    for command in ("generate", "infill"):
        there = there.replace(f"{command} . ", f"{command} {REPO} ")
    assert (back / "README.md").read_text() == there
    for name in ("progress.svg", "pick.json"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    assert set(api.list_repo_files(REPO)) >= {path.name for path in folder.iterdir()}


def test_the_hub_s_own_card_comes_before_the_export_s(
    exported: Path, hub: Hub, api: HfApi, unopened: None
) -> None:
    api.create_repo(REPO)
    api.upload_file(path_or_fileobj=b"mine", path_in_repo="README.md", repo_id=REPO)
    assert main(["export", str(exported), "--to", URI]) == 0
    path = api.hf_hub_download(REPO, "README.md")
    assert Path(path).read_bytes() == b"mine"


def test_somebody_else_s_push_is_not_overwritten(exported: Path, hub: Hub, api: HfApi) -> None:
    destination = Destination(URI, replace=False, public=False)
    api.upload_file(path_or_fileobj=b"theirs", path_in_repo="config.json", repo_id=REPO)
    with pytest.raises(UserError, match="somebody pushed meanwhile"):
        destination.publish(exported, "an export", lambda line: None)
    assert api.list_repo_files(REPO).count(layout.WEIGHTS) == 0


def test_a_run_and_another_s_model_are_not_written_over(
    tmp_path: Path, hub: Hub, api: HfApi
) -> None:
    address = tiny_run(tmp_path / "run", averages=False, uri="hf://alice/run")
    assert load("alice/run").name == "global, generation 4"
    with pytest.raises(UserError, match="holds a run"):
        Destination(address, replace=True, public=False)
    api.create_repo(REPO)
    content = b'{"model_type": "gpt2"}'
    api.upload_file(path_or_fileobj=content, path_in_repo="config.json", repo_id=REPO)
    with pytest.raises(UserError, match="another model than an export"):
        Destination(URI, replace=True, public=False)
    with pytest.raises(UserError, match="a model of another kind"):
        load(REPO)


def test_a_hub_id_that_does_not_exist(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "alice/nothing"]) == 2
    said = capsys.readouterr().err
    assert "no model at alice/nothing: no such folder here" in said
    assert "HF_TOKEN" in said
    for name in ("hf://alice", "hf://buckets/alice/x", "hf://alice/x@main"):
        with pytest.raises(UserError, match="write the address as hf://user/repo"):
            Destination(name, replace=False, public=False)
