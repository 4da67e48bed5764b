import json
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from diffurefill.config import UserError
from diffurefill.data.tokens.tokenizer import load_tokenizer
from tests.data.tokens.kinds import MODEL
from tests.data.tokens.test_sentencepiece import PIECES, model_file


def test_a_folder_gives_its_json_before_its_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(MODEL.to_json())
    (tmp_path / "tokenizer.model").write_bytes(b"not looked at")
    assert load_tokenizer(tmp_path).to_json() == MODEL.to_json()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)


class Hub:
    """A hub of one repository, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str | None, str]] = []

    def download(self, repo: str, name: str, revision: str | None = None) -> str:
        self.asked.append((repo, revision, name))
        if not (self.folder / name).exists():
            raise RemoteEntryNotFoundError(f"no {name}", response=_answer(404))
        return str(self.folder / name)


def _answer(status: int) -> Any:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://127.0.0.1/x"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    return made


def test_a_tokenizer_json_on_the_hub_is_loaded_at_its_revision(hub: Hub) -> None:
    (hub.folder / "tokenizer.json").write_text(MODEL.to_json())
    assert load_tokenizer("hf://some/repo@v1.0").to_json() == MODEL.to_json()
    assert hub.asked == [("some/repo", "v1.0", "tokenizer.json")]


def test_without_it_the_model_is_loaded_with_the_files_beside_it(hub: Hub) -> None:
    (hub.folder / "tokenizer.model").write_bytes(model_file())
    (hub.folder / "added_tokens.json").write_text(json.dumps({"<im_end>": len(PIECES)}))
    assert load_tokenizer("hf://some/repo").num_pieces == len(PIECES) + 1
    assert {name for _, _, name in hub.asked} == {
        *("tokenizer.json", "tokenizer.model", "added_tokens.json", "tokenizer_config.json"),
    }


def test_a_repository_without_a_tokenizer_is_refused(hub: Hub) -> None:
    with pytest.raises(UserError, match=r"hf://some/repo: the repository holds neither"):
        load_tokenizer("hf://some/repo")


@pytest.mark.parametrize("address", ["hf://repo", "hf://a/b/c", "hf://a/b@", "hf://datasets/a/b"])
def test_a_wrong_address_is_refused(hub: Hub, address: str) -> None:
    with pytest.raises(UserError, match=r"write the address as hf://user/repo"):
        load_tokenizer(address)
    assert not hub.asked


@pytest.mark.parametrize(
    "error",
    [
        RepositoryNotFoundError("401 no such repository\nmore", response=_answer(401)),
        RevisionNotFoundError("no such revision", response=_answer(404)),
        LocalEntryNotFoundError("no connection and no copy"),
        HFValidationError("bad name"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_hub_that_does_not_answer_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UserError, match=r"cannot fetch tokenizer\.json from the hub") as raised:
        load_tokenizer("hf://some/repo")
    assert "\n" not in str(raised.value)
