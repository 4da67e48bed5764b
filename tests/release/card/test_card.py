"""A card shows the figures of its files, all of them and no others."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffurefill.cli import main
from diffurefill.config import DecodeConfig, UserError, load_preset
from diffurefill.release.card.model import CardModel, read_model
from diffurefill.release.card.page import card
from diffurefill.release.card.progress import MAX_ROWS, curve, progress_rows
from diffurefill.release.card.sources import Source, one_of, read_source
from diffurefill.release.card.write import addressed_anew
from tests.release.card import results

CONFIG = load_preset("demo")
PROVENANCE = {
    "run_id": results.RUN, "generation": results.GENERATION, "step": 1500, "tokens": 3_072_000,
    "weights": "ema", "globals": 30, "flops": 7.68e12,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> CardModel:
    return read_model(results.exported_folder(tmp_path / "model", CONFIG, PROVENANCE), "Small")


@pytest.fixture
def sources(tmp_path: Path, model: CardModel) -> list[Source]:
    return [
        results.source(tmp_path, "probes.json", results.probe_records()),
        results.source(tmp_path, "progress.jsonl", results.progress_lines(30)),
        results.source(tmp_path, "evaluate.json", benchmarks_of(model)),
        results.source(tmp_path, "pick.json", results.picked()),
    ]


def benchmarks_of(model: CardModel) -> dict[str, Any]:
    return results.evaluated(model.parameters, model.weights_sha256)


def text_of(page: str) -> str:
    return page.split("---\n", 2)[2]


def test_files_are_told_apart_by_what_they_hold(sources: list[Source]) -> None:
    assert [s.kind for s in sources] == ["probes", "progress", "benchmarks", "pick"]


def test_a_log_of_one_line_is_a_log(tmp_path: Path) -> None:
    log = results.source(tmp_path, "log.jsonl", results.progress_lines(1))
    assert log.kind == "progress"
    assert progress_rows(log.content)[1:] == [["0", "0", "0", "7.0000"]]


@pytest.mark.parametrize("torn", [1, 9, 60])
def test_a_torn_last_line_of_a_log_is_left_out(tmp_path: Path, torn: int) -> None:
    whole = results.progress_lines(3)
    log = results.source(tmp_path, "log.jsonl", whole + whole[:torn])
    assert log.content == [json.loads(line) for line in whole.splitlines()]
    assert len(results.source(tmp_path, "log.jsonl", whole.rstrip()).content) == len(log.content)
    with pytest.raises(UserError, match="no result"):
        results.source(tmp_path, "log.jsonl", whole[:torn] + "\n" + whole)


def test_a_log_without_the_held_out_set_is_refused() -> None:
    with pytest.raises(UserError, match="no figure of held_out"):
        curve([{"gen": 1, "weights": "ema", "sets": {}}])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "[]",
        "{}",
        "[1, 2]",
        '{"models": [{}]}',
        '{"models": []}',
        '{"models": [1]}',
        '{"result": "pick"}',
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match="no result that a card shows"):
        read_source(tmp_path / "x.json")


def test_two_files_of_a_kind_are_refused(sources: list[Source]) -> None:
    with pytest.raises(UserError, match="are both probes"):
        one_of([sources[0], sources[0]], "probes")


def test_every_figure_stands_on_the_card(model: CardModel, sources: list[Source]) -> None:
    page = card(model, sources, repo="me/small")
    for shown in (
        "565,888", "1,500 of 2,400", "3,072,000", "1.043e+13", "7.680e+12",  # training
        "3.5000 [", "3.7500 [", "62.5%", "43.8%", "6.125 [6.000, 6.250]", "37.5% [25.0%, 50.0%]",
        "31.2 [25.0, 37.5]", "87.5 [81.2, 93.8]", "200 of 2,376", "0.4.13",
        "run-7", "`diffurefill evaluate ours` at ffffffffffff", "3.3750",
    ):  # fmt: skip
        assert shown in page, shown
    assert "me/small" in page
    assert "| run: ema |" in page
    assert "/home" not in page


def test_no_figure_stands_on_the_card_that_no_file_has(
    model: CardModel, sources: list[Source]
) -> None:
    """Every decimal number of the tables, looked for among the rounded numbers of the files."""
    known = {PROVENANCE["flops"], 6 * model.parameters * 3_072_000}
    known |= {model.provenance["tokens"] / model.parameters, 1.0, 0.1, 3e-3, 0.9}
    _gather([source.content for source in sources], known)
    intervals = [3.25, 3.75, 3.5, 4.0]  # what the bootstrap of two rows can give
    shown = {f"{v:{spec}}" for v in known for spec in ("g", ".1f", ".3f", ".4f", ".3e", ".0f")}
    shown |= {f"{100 * v:.1f}" for v in known} | {f"{v:.4f}" for v in intervals} | {"0.15"}
    page = text_of(card(model, sources, repo="me/small"))
    sha = {source.sha256[:12] for source in sources}
    numbers = re.findall(r"(?<![\w.])\d+\.\d+(?:e[+-]\d+)?(?![\w.])", page)
    assert len(numbers) > 40
    assert [n for n in numbers if n not in shown and n != "0.4.13" and n not in sha] == []


def _gather(value: object, into: set[float]) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _gather(inner, into)
    elif isinstance(value, list):
        for inner in value:
            _gather(inner, into)
    elif isinstance(value, int | float):
        into.add(float(value))


def test_a_section_without_its_file_is_left_out(model: CardModel) -> None:
    page = card(model, [], repo="me/small")
    for heading in ("## Progress", "## Probes", "## Benchmarks", "## Which weights"):
        assert heading not in page
    assert "No public benchmark was run." in page
    assert "FLOPs by 6ND" in page


def test_what_is_not_known_is_not_said(tmp_path: Path) -> None:
    folder = results.exported_folder(tmp_path / "imported", CONFIG, None)
    page = card(read_model(folder, "Old"), [], repo="me/old")
    assert "| weights | imported |" in page
    for word in ("FLOPs", "tokens a parameter", "fleet", "Unfinished"):
        assert word not in page


def test_guessing_is_called_guessing(model: CardModel, sources: list[Source]) -> None:
    page = card(model, sources, repo="me/small")
    assert "Not told from guessing (chance lies in the interval): ARC-e." in page


def test_a_scorer_s_options_stand_beside_its_figures(model: CardModel, tmp_path: Path) -> None:
    content = benchmarks_of(model)
    for one in content["models"][:-1]:
        one["scored_by"] = "chain, 2 tokens a pass, guidance 0.5"
    page = card(model, [results.source(tmp_path, "e.json", content)], repo="user/small")
    assert "ours (chain, 2 tokens a pass, guidance 0.5)" in page
    assert "zero-shot, chain, 2 tokens a pass, guidance 0.5 scorer" in page
    assert "`chain` scores exactly" in page
    assert "are no likelihoods of the model" in page


def test_contexts_that_were_cut_are_told(model: CardModel, tmp_path: Path) -> None:
    content = benchmarks_of(model)
    content["models"][2] |= {"num_truncated": 52, "max_tokens": 128}
    page = card(model, [results.source(tmp_path, "e.json", content)], repo="user/small")
    assert "52 contexts of the benchmarks were cut from the left to 128 tokens." in page


def test_the_metadata_is_what_the_hub_reads(model: CardModel, sources: list[Source]) -> None:
    page = card(model, sources, repo="me/small", license_name="mit", language="en")
    found = yaml.safe_load(page.split("---\n")[1])
    assert found["license"] == "mit"
    assert found["pipeline_tag"] == "text-generation"
    (entry,) = found["model-index"]
    assert entry["name"] == "Small"
    assert [(r["dataset"]["type"], r["metrics"][0]["value"]) for r in entry["results"]] == [
        ("arc_easy", 0.3125),
        ("sciq", 0.5),
    ]


def test_data_sets_of_the_hub_are_named(tmp_path: Path) -> None:
    config = load_preset("base-1b")
    folder = results.exported_folder(tmp_path / "m", config, None)
    found = yaml.safe_load(card(read_model(folder, "Big"), [], repo="x").split("---\n")[1])
    assert "openbmb/Ultra-FineWeb-L3" in found["datasets"]
    assert "model-index" not in found


def test_figures_of_another_model_are_refused(model: CardModel, tmp_path: Path) -> None:
    for content in (results.evaluated(model.parameters, "0" * 12), {"models": [{"tasks": {}}]}):
        other = results.source(tmp_path, "e.json", content)
        with pytest.raises(UserError, match="evaluate this model"):
            card(model, [other], repo="x")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (results.picked() | {"run_id": "run-8"}, "pick of run run-8 at generation 30"),
        (results.picked() | {"generation": 99}, "pick of run run-7 at generation 99"),
        (results.progress_lines(3).replace(results.RUN, "run-8"), "is of run run-8"),
    ],
)
def test_figures_of_another_run_are_refused(
    model: CardModel, tmp_path: Path, content: Any, match: str
) -> None:
    with pytest.raises(UserError, match=match):
        card(model, [results.source(tmp_path, "other", content)], repo="x")
    imported = replace(model, provenance={})
    with pytest.raises(UserError, match="no known run"):
        card(imported, [results.source(tmp_path, "other", content)], repo="x")


def test_the_progress_table_keeps_both_ends_and_stays_short(sources: list[Source]) -> None:
    rows = progress_rows(sources[1].content)
    assert rows[0][-2:] == ["held-out CE, global", "held-out CE, ema"]
    assert len(rows) <= 1 + MAX_ROWS
    assert rows[1] == ["0", "0", "0", "7.0000", "-"]
    assert rows[-1] == ["29", "1,450", "29,000", "3.3750", "3.3750"]


def test_the_curve_has_a_line_a_kind(sources: list[Source]) -> None:
    svg = curve(sources[1].content)
    assert svg.count("<polyline") == 2
    assert "generation" in svg


def test_a_generation_without_a_figure_is_passed_over() -> None:
    lines = [json.loads(line) for line in results.progress_lines(3).splitlines()]
    lines[-1] = {"weights": "global", "gen": 2, "problem": "not finite"}
    assert progress_rows(lines)[-1] == ["2", "-", "-", "-", "6.7500"]


def test_the_command_writes_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = results.exported_folder(tmp_path / "model", CONFIG, PROVENANCE)
    results.source(tmp_path, "log.jsonl", results.progress_lines(4))
    command = ["card", str(folder), "--results", str(tmp_path / "log.jsonl"), "--name", "Small"]
    assert main(command) == 0
    assert (folder / "README.md").read_text().count("progress.svg") == 1
    assert (folder / "progress.svg").read_text().startswith("<svg")


def test_a_card_that_goes_along_changes_where_it_must(model: CardModel, sources: list[Source]):
    """The address and the default decoder; not what a person wrote in their place."""
    longer = replace(CONFIG.decode.stages[0], num_passes=33)
    other = replace(CONFIG, decode=DecodeConfig(stages=(longer,)))
    after = replace(model, config=other)
    here, there = (card(model, sources, repo=repo).encode() for repo in (".", "a/b"))
    wanted = card(after, sources, repo="a/b").encode()
    for content in (here, there):
        assert addressed_anew(content, model, model, "a/b") == there
        assert addressed_anew(content, model, after, "a/b") == wanted
    mine = here.replace(b"or, with the package itself", b"or")
    assert addressed_anew(mine, model, after, "a/b") == mine


def test_a_folder_that_is_no_export_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["card", str(tmp_path)]) == 2
    assert "make one with `diffurefill export`" in capsys.readouterr().err
