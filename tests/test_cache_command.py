"""`diffurefill bench cache`: kept keys and values beside exact decoding, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.cli import main
from diffurefill.fleet.alone import train_alone
from tests.tiny import tiny_config, write_corpus

SMALL = ["--prompt-tokens", "8", "--num-tokens", "16", "--prompts", "3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_config(write_corpus(folder))
    config = replace(config, model=replace(config.model, layers=2))
    train_alone(folder / "two", config, 4, lambda _: None)
    causal = replace(config, model=replace(config.model, causal=True))
    train_alone(folder / "causal", causal, 4, lambda _: None)
    return folder


def test_the_cost_is_told_and_within_the_bound(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "cache", str(trained / "two"), *SMALL, "--max-nats", "5"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "3 texts" in told
    assert "refresh_every = 4 may be kept" in told
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_rows"] == 3
    assert found["positions_ratio"] < 0.8
    assert found["cost"] == pytest.approx(found["nll_kept"] - found["nll_exact"])


def test_a_cost_that_cannot_be_ruled_out_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cache", str(trained / "two"), *SMALL, "--max-nats", "-5"]) == 2
    shown = capsys.readouterr()
    assert "3 texts" in shown.out
    assert "cannot be ruled out" in shown.err


@pytest.mark.parametrize(
    ("which", "flags", "message"),
    [
        ("two", ["--refresh-every", "1"], "--refresh-every must be at least 2"),
        ("two", ["--prompts", "1"], "--prompts and"),
        ("causal", [], "keeps its past exactly"),
        ("two", ["--num-tokens", "200"], "the context holds 32"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    trained: Path, which: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cache", str(trained / which), *SMALL[:4], *flags]) == 2
    assert message in capsys.readouterr().err
