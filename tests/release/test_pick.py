"""`pick`: every kind on the same items, one of those that nothing tells from the best by rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffurefill.cli import main
from diffurefill.config import HELD_OUT
from diffurefill.evaluate.probes import HeldOut
from diffurefill.evaluate.scores import Scores
from diffurefill.fleet import exported as layout
from diffurefill.release.pick import Candidate, choose, worse_on
from tests.release.runs import tiny_run
from tests.tiny import WORDS

NUM_ROWS = 40


def candidate(kind: str, held_out: list[float], wiki: list[float] | None = None) -> Candidate:
    """One whose rows have these CEs, one masked token each."""
    given = {HELD_OUT: held_out, "wiki": wiki or [1.0] * NUM_ROWS}
    sets = {
        name: HeldOut(name, {0.5: sum(rows) / len(rows)}, {0.5: [(ce, 1) for ce in rows]})
        for name, rows in given.items()
    }
    return Candidate(kind, "", Scores(kind, sets, None))


def noisy(base: float, spread: float) -> list[float]:
    """Rows that go up and down around `base`, in the same way for no two spreads."""
    return [base + spread * (-1) ** row * (1 + row % 7) for row in range(NUM_ROWS)]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["global", "ema", "last-3", "last-5", "swa"], "swa"),
        (["global", "ema", "last-3", "last-5"], "last-5"),
        (["global", "ema", "last-3"], "last-3"),
        (["global", "ema"], "ema"),
        (["global"], "global"),
    ],
)
def test_of_equals_the_one_that_averages_most_is_taken(kinds: list[str], expected: str) -> None:
    same = [candidate(kind, noisy(3.0, 1e-3 * (i + 1))) for i, kind in enumerate(kinds)]
    assert choose(same) == expected
    assert choose(same[::-1]) == expected


def test_what_is_surely_worse_is_out() -> None:
    leader = candidate("global", [3.0] * NUM_ROWS)
    worse = candidate("swa", [3.01 + 1e-4 * (row % 3) for row in range(NUM_ROWS)])
    assert choose([leader, worse]) == "global"
    assert worse_on(worse.scores, leader.scores) == [HELD_OUT]
    near = candidate("ema", noisy(3.0, 1e-3))
    assert choose([leader, near, worse]) == "ema"


def test_another_probe_can_put_it_out() -> None:
    leader = candidate("global", [3.0] * NUM_ROWS)
    wiki = [1.02 + 1e-3 * (row % 5) for row in range(NUM_ROWS)]
    assert choose([leader, candidate("swa", noisy(3.0, 1e-3), wiki)]) == "global"


def test_the_command_compares_all_weights_and_export_takes_its_choice(
    run: str, tmp_path: Path, unopened: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pick.json"
    assert main(["pick", run, "--out", str(out), "--last", "2", "9"]) == 0
    said = capsys.readouterr().out
    assert "without last-9" in said
    assert "(globals 4, 3)" in " ".join(said.split())
    record = json.loads(out.read_text())
    kinds = [c["weights"] for c in record["candidates"]]
    assert sorted(kinds) == ["ema", "global", "last-2", "swa"]
    means = [c["sets"][HELD_OUT]["mean"] for c in record["candidates"]]
    assert means == sorted(means), "the leader comes first"
    assert record["leader"] == kinds[0]
    assert record["candidates"][0]["against_leader"][HELD_OUT]["high"] == 0.0
    assert record["picked"] in kinds
    assert {"command", "package_version", "commit", "machine"} <= set(record)

    to = tmp_path / "model"
    options = ["--weights", "best", "--picked", str(out)]
    assert main(["export", run, *options, "--to", str(to)]) == 0
    source = json.loads((to / layout.PROVENANCE).read_text())["source"]
    assert source["weights"] == record["picked"]
    chosen = next(c for c in record["candidates"] if c["weights"] == record["picked"])
    assert source["sha256"] == chosen["sha256"]
    assert json.loads((to / "pick.json").read_text()) == record


def test_facts_are_one_more_probe_and_what_was_out_is_said(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        {"subj": f"dog {n}", "prop": "color", "obj": w, "possible_answers": [w]}
        for n, w in enumerate(WORDS * 6)
    ]
    questions, facts, out = (tmp_path / name for name in ("q.jsonl", "facts.jsonl", "pick.json"))
    questions.write_text("\n".join(map(json.dumps, rows)))
    made = ["probe", "facts", "--from", str(questions), "--to", str(facts), "--tokenizer", run]
    assert main(made) == 0
    options = ["--facts", str(facts), "--out", str(out), "--last", "2", "99"]
    assert main(["pick", run, *options]) == 0
    said = capsys.readouterr().out
    assert "contained" in said
    assert "\u2026" not in said, "a figure was cut off"
    record = json.loads(out.read_text())
    for candidate in record["candidates"]:
        assert candidate["facts"]["num_facts"] > 20
        assert "fact_nll" in candidate["against_leader"]
    for kind, names in record["out"].items():
        assert f"out: {kind}, worse than {record['leader']} on {', '.join(names)}" in said
    assert record["picked"] not in record["out"]
    assert record["missing"]["last-99"].startswith("of its globals")
    assert str(tmp_path) not in out.read_text()
    assert run not in out.read_text()
    assert main(["pick", run, "--facts", str(questions)]) == 2
    assert "is not a fact probe" in capsys.readouterr().err


def test_the_result_is_written_though_nobody_reads_the_table(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("rich.console.Console.print", gone)
    out = tmp_path / "pick.json"
    with pytest.raises(BrokenPipeError):
        main(["pick", run, "--out", str(out)])
    assert json.loads(out.read_text())["picked"]


def test_a_pick_of_another_time_or_run_is_refused(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(record: dict, where: str = run) -> str:
        path = tmp_path / "pick.json"
        path.write_text(json.dumps(record))
        options = ["--weights", "best", "--picked", str(path), "--to", str(tmp_path / "x")]
        assert main(["export", where, *options]) == 2
        return capsys.readouterr().err

    other = tiny_run(tmp_path / "other", averages=False)
    capsys.readouterr()
    assert main(["pick", other, "--out", str(tmp_path / "mine.json")]) == 0
    capsys.readouterr()
    mine = json.loads((tmp_path / "mine.json").read_text())
    assert "is not a pick of" in refused(mine)
    assert "picked at generation 3, the run is at 4" in refused(mine | {"generation": 3}, other)
    without_kind = {name: value for name, value in mine.items() if name != "picked"}
    for record in ({}, {"result": "pick"}, without_kind):
        assert "is not a pick of" in refused(record, other)
    assert main(["export", run, "--picked", "x.json", "--to", str(tmp_path / "x")]) == 2
    assert "--picked goes with" in capsys.readouterr().err


def test_a_folder_of_one_model_offers_no_choice(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pick", str(exported)]) == 2
    assert "nothing to pick from" in capsys.readouterr().err
