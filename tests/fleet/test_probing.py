"""`probe` on train folders and stores: one table, differences, and what is not compared."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from diffurefill.cli import main
from diffurefill.config import HELD_OUT, ModelConfig, UserError
from diffurefill.evaluate.scores import differences
from diffurefill.fleet import records
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.create import create_run
from diffurefill.fleet.probing import Asked, score_models
from tests.tiny import WORDS, tiny_config, write_corpus


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train folders `a` and `b` (longer trained), of one probe; `other` of another; a `store`."""
    folder = tmp_path_factory.mktemp("probing")
    config = tiny_config(write_corpus(folder))
    config = replace(config, probe=replace(config.probe, short_length=8))
    train_alone(folder / "a", config, 4, quiet)
    shutil.copytree(folder / "a", folder / "b")
    train_alone(folder / "b", config, 12, quiet)
    train_alone(folder / "other", replace(config, seed=1), 4, quiet)
    twin = replace(config.model, causal=True)
    train_alone(folder / "twin", replace(config, model=twin), 4, quiet)
    create_run(str(folder / "store"), config, folder / "work", quiet)
    return folder


def test_the_first_model_is_what_the_others_are_compared_with(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    a, b = str(folder / "a"), str(folder / "b")
    assert main(["probe", a, b]) == 0
    shown = capsys.readouterr().out
    assert "held_out" in shown
    assert "decoding accuracy" in shown
    assert "held_out: CE by mask rate" in shown
    assert shown.count("[") == 8  # held_out, short, token, pair of each
    assert main(["probe", a, b, "--json", "--set", "held_out,short"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["model"], second["model"]) == (a, b)
    difference = second["against_first"][HELD_OUT]
    means = [record["sets"][HELD_OUT]["mean"] for record in (first, second)]
    assert difference["mean"] == pytest.approx(means[1] - means[0])
    assert difference["low"] < difference["mean"] < difference["high"]
    assert first["against_first"]["token"]["high"] == 0.0


def test_a_run_shows_the_weights_that_it_has(folder: Path) -> None:
    store = str(folder / "store")
    found = list(score_models([store, str(folder / "a")], Asked()))
    assert [f.model for f in found] == [f"{store}: global, generation 0", str(folder / "a")]
    with pytest.raises(UserError, match="no SWA is kept"):
        list(score_models([store], Asked(), ["swa"]))


def test_figures_of_two_versions_are_not_compared(folder: Path) -> None:
    places = [str(folder / "a"), str(folder / "other")]
    with pytest.raises(UserError, match="held_out is another probe"):
        list(score_models(places, Asked()))


def test_one_probe_file_for_all_makes_them_comparable(folder: Path) -> None:
    places = [str(folder / "a"), str(folder / "b")]
    file = folder / "other" / records.PROBE
    found = list(score_models(places, Asked(sets=[HELD_OUT], probe_file=file)))
    assert [list(f.sets) for f in found] == [[HELD_OUT]] * 2
    other = next(score_models([str(folder / "other")], Asked()))
    assert found[0].sets[HELD_OUT].probe == other.sets[HELD_OUT].probe


def test_a_set_that_is_not_there_is_answered_with_those_that_are(folder: Path) -> None:
    with pytest.raises(UserError, match="no probe set wiki: there are held_out, short"):
        list(score_models([str(folder / "a")], Asked(sets=["wiki"])))


def test_the_twin_scores_other_tokens_and_fills_no_gaps(folder: Path) -> None:
    a, twin = score_models([str(folder / "a"), str(folder / "twin")], Asked(sets=[HELD_OUT]))
    assert twin.decoding is None
    assert differences(twin, a) == {}


def test_weights_that_are_not_numbers_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffurefill.fleet import loading

    load_weights = loading.load_weights

    def broken(path: Path) -> dict[str, torch.Tensor]:
        return {k: v * float("nan") for k, v in load_weights(path).items()}

    monkeypatch.setattr(loading, "load_weights", broken)
    with pytest.raises(UserError, match="not a finite number"):
        list(score_models([str(folder / "store")], Asked()))


def test_a_tokenizer_of_other_pieces_is_refused(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(write_corpus(tmp_path, 300))
    other = replace(
        config,
        data=replace(config.data, tokenizer_pieces=300),
        model=ModelConfig(vocab_size=320, width=16, layers=1, heads=2, ffn_width=16),
    )
    train_alone(tmp_path / "c", other, 1, quiet)
    with pytest.raises(UserError, match="another vocabulary"):
        list(score_models([str(tmp_path / "c")], Asked(probe_file=folder / "a" / records.PROBE)))


def test_ids_beyond_the_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    arrays = load_file(folder / "a" / records.PROBE)
    arrays["ids"] = arrays["ids"] + 10**6
    save_file(arrays, tmp_path / "probe.safetensors")
    with pytest.raises(UserError, match="ids beyond the model's"):
        list(score_models([str(folder / "a")], Asked(probe_file=tmp_path / "probe.safetensors")))


def test_facts_are_made_from_popqa_and_asked(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = [
        {"subj": f"dog {n}", "prop": "color", "obj": w, "possible_answers": [w]}
        for n, w in enumerate(WORDS * 6)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    a, b, facts = str(folder / "a"), str(folder / "b"), str(tmp_path / "facts.jsonl")
    made = ["probe", "facts", "--from", str(tmp_path / "q.jsonl"), "--to", facts]
    assert main([*made, "--tokenizer", str(folder / "store")]) == 0
    assert "facts: color" in capsys.readouterr().out
    assert main(["probe", a, b, "--facts", facts]) == 0
    shown = capsys.readouterr().out
    assert "contained" in shown
    assert "choice by chance: 25%" in shown
    assert main(["probe", a, b, "--facts", facts, "--json"]) == 0
    second = json.loads(capsys.readouterr().out)[1]
    num_facts = second["facts"]["num_facts"]
    assert num_facts >= 35
    assert second["against_first"]["fact_nll"]["num_items"] == num_facts
    assert main(["probe", a, "--facts", str(tmp_path / "q.jsonl")]) == 2
    assert "is not a fact probe" in capsys.readouterr().err
    nowhere = ["--to", str(tmp_path / "no" / "facts.jsonl"), "--tokenizer", a]
    assert main(["probe", "facts", "--from", str(tmp_path / "q.jsonl"), *nowhere]) == 2
