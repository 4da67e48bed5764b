"""`init`: what is in the way of a run is told first, and left as it is."""

from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.fleet import create
from diffurefill.fleet.create import create_run
from diffurefill.store.folder import FolderStore
from tests.tiny import tiny_config, write_corpus


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.toml", "[train]\n"), ("config.json", '{"model_type": "diffurefill"}')],
)
def test_no_run_is_made_where_a_models_folder_would_hide_it(
    tmp_path: Path, name: str, content: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_text(content)
    config = tiny_config(write_corpus(tmp_path))
    for uri in (str(folder), f"file://{folder}"):
        with pytest.raises(UserError, match="holds a model already: give the run a folder"):
            create_run(uri, config, tmp_path / "work", quiet)
    assert [path.name for path in folder.iterdir()] == [name]


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("ftp://host/run", "no store speaks ftp"),
        ("run", "there is a run at"),
        ("afile", "afile is a file"),
        ("afile/run", "afile is a file"),
        ("s3://bucket/run", "no keys for https://minio.lan"),
    ],
)
def test_what_is_in_the_way_of_a_run_is_told_before_the_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, told: str
) -> None:
    config = tiny_config(write_corpus(tmp_path))
    (tmp_path / "afile").write_text("")
    FolderStore(tmp_path / "run", create=True).publish("main", {"a": b"1"}, expect=None)
    monkeypatch.setattr(create, "open_corpus", pytest.fail)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio.lan")
    uri = place if "://" in place else str(tmp_path / place)
    with pytest.raises(UserError, match=told):
        create_run(uri, config, tmp_path / "work", quiet)
