"""`init`: what is in the way of a run is told first, and left as it is."""

from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.fleet.create import create_run
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
