"""Where a generation is shown; what cannot be written is said before any work."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from diffurefill.cli import main
from diffurefill.config import UserError
from diffurefill.decode.view.views import Views
from tests.decode.view.passes import decode, story
from tests.decode.view.test_page import data_of


def test_every_view_that_is_named_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.html"
    views = Views(terminal=True, page=path)
    views.check()
    assert list(tmp_path.iterdir()) == [], "the check leaves nothing behind"
    views.show(story(), decode)
    assert "refill 1/1: 2 redone" in capsys.readouterr().out
    assert [s["title"] for s in data_of(path.read_text("utf-8"))] == ["1: He said ..."]


def test_no_view_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Views()
    Views().show(story(), decode)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flag", ["--save-html", "--save-gif"])
def test_a_path_that_cannot_be_written_is_told_before_the_model_is_looked_for(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, what in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x", "make it first"),
        (tmp_path / ("long" * 100), "File name too long"),
    ):
        assert main(["generate", str(tmp_path / "none"), flag, str(path)]) == 2
        assert what in capsys.readouterr().err
        assert main(["infill", "none", "--text", "a[MASK*2]", flag, str(path)]) == 2
        assert what in capsys.readouterr().err


def test_a_gif_without_pillow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError(name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"diffurefill\[plot\]"):
        Views(gif=tmp_path / "x.gif").check()
