"""`diffurefill bench pilot`: what is refused before anything is trained, and what a result says."""

import json
from pathlib import Path

import pytest

from diffurefill.cli import main
from diffurefill.pilot import run as pilot
from tests.pilot.test_run import CountingJudge
from tests.tiny import tiny_config, write_config, write_corpus

SHORT = ["--prompt-tokens", "4", "--num-tokens", "8"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_config(write_corpus(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arms", "nosuch"], "no arm nosuch"),
        (["--decode", "decode-blocks"], "decode-blocks writes block by block"),
        (["--decode", "decode-threshold"], "number of passes"),
        (["--decode", "decode-hierarchical"], "number of passes"),
        (["--decode", "decode-left-to-right"], "one draft and one refill"),
        (["--num-tokens", "128"], "data.row_length is 32"),
        (["--out", "none/x.json"], "make it first"),
        (["--prompts", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_model_is_trained(
    config: Path,
    tmp_path: Path,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "pair"
    asked = ["bench", "pilot", str(folder), "--config", str(config), *SHORT, *flags]
    assert main(asked) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_a_result_tells_what_was_asked_for_and_no_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot, "open_judge", CountingJudge)
    asked = ["bench", "pilot", str(tmp_path / "pair"), "--config", str(config), *SHORT]
    asked += ["--judge", "/somewhere/a_judge", "--prompts", "3", "--arms", "real", "tuned"]
    assert main([*asked, "--train-steps", "2", "--seed", "3"]) == 0
    found = json.loads((tmp_path / "pair" / "pilot.json").read_text())
    assert found["command"] == (
        "diffurefill bench pilot --judge a_judge --decode decode-small --train-steps 2 "
        "--arms real tuned --prompts 3 --prompt-tokens 4 --num-tokens 8 --seed 3"
    )
    assert str(tmp_path) not in json.dumps(found)
