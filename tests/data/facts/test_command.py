"""`data facts` as a person types it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tyro

from diffurefill.commands.facts import Facts
from diffurefill.config import UserError
from tests.data.facts.chat_server import Reply, Request, restated, serve
from tests.data.facts.clockmakers import good, lead

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"


def facts(*args: object) -> int:
    return tyro.cli(Facts, args=[str(arg) for arg in args]).run()


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def manifest_of(out: Path) -> dict[str, Any]:
    return json.loads(out.with_name(out.name.replace(".jsonl", ".manifest.json")).read_text())


@pytest.fixture
def leads(tmp_path: Path) -> Path:
    path = tmp_path / "leads.jsonl"
    records = [{"id": n, "title": lead(n).title, "text": lead(n).text} for n in range(10)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.txt"
    path.write_text(f"{lead(3).title}\nNobody\n")
    return path


def test_write(
    tmp_path: Path, leads: Path, held_out: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setenv("FACTS_KEY", "sk-secret")
    out = tmp_path / "facts.jsonl"
    with serve(good) as server:
        code = facts(
            "write", leads, "--out", out, "--endpoint", server.url, "--model", "tiny",
            "--licence", "CC BY-SA 4.0", "--held-out", held_out, "--limit", 8,
            "--key-variable", "FACTS_KEY",
        )  # fmt: skip
    assert code == 0
    assert [record["source_id"] for record in json_lines(out)] == [
        str(n) for n in range(8) if n != 3
    ]
    made = manifest_of(out)
    assert made["held_out"] == {
        "list": "held-out.txt", "subjects": 2, "left_out": 1, "overlap": 0,
    }  # fmt: skip
    assert made["licences"] == {"CC BY-SA 4.0": 7}
    said = capsys.readouterr().out
    assert "7 leads, 0 of them answered already" in said
    assert "facts: 7 of 7 texts pass; 7 records" in said
    everything = [said, *(path.read_text() for path in tmp_path.iterdir())]
    assert not any("sk-secret" in text for text in everything)


def test_the_overlap_with_held_out_subjects_is_counted_where_it_is_kept(
    tmp_path: Path, leads: Path, held_out: Path
):
    out = tmp_path / "facts.jsonl"
    with serve(good) as server:
        facts(
            "write", leads, "--out", out, "--endpoint", server.url, "--model", "tiny",
            "--held-out", held_out, "--keep-held-out",
        )  # fmt: skip
    assert len(json_lines(out)) == 10
    assert (manifest_of(out)["held_out"]["left_out"], manifest_of(out)["held_out"]["overlap"]) == (
        0,
        1,
    )


def test_missing_answers_are_said_and_the_exit_code_is_one(
    tmp_path: Path, leads: Path, capsys: pytest.CaptureFixture[str]
):
    def one_fails(request: Request) -> Reply:
        return Reply("no", status=400) if request.title == lead(0).title else good(request)

    with serve(one_fails) as server:
        out = tmp_path / "facts.jsonl"
        assert facts("write", leads, "--out", out, "--endpoint", server.url, "--model", "t") == 1
    assert "1 questions got no answer: start again to ask them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--concurrency", "0"], "must be above 0"),
        (["--num-sentences", "0"], "must be above 0"),
        (["--timeout-seconds", "0"], "must be above 0"),
        (["--keep-held-out"], "name their list with --held-out"),
        (["--out", "/nowhere/facts.jsonl"], "there is no folder /nowhere"),
        (["--out", "/"], "/ is a folder"),
        (["--endpoint", "localhost:8000"], "no web address"),
        (["--key-variable", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE holds no key"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, leads: Path, args: Sequence[str], message: str):
    usual = ["--out", tmp_path / "facts.jsonl", "--endpoint", "http://127.0.0.1:9/v1"]
    with pytest.raises(UserError, match=message):
        facts("write", leads, *usual, "--model", "tiny", *args)


def test_templates(tmp_path: Path, held_out: Path, capsys: pytest.CaptureFixture[str]):
    source, patterns, out = (tmp_path / f"{name}.jsonl" for name in ("f", "p", "out"))
    known = [("r", "Ada", "London"), ("r", lead(3).title, "Oslo"), ("other", "Ada", "maths")]
    source.write_text(
        "".join(
            json.dumps({"relation": relation, "sub_label": subject, "obj_label": value}) + "\n"
            for relation, subject, value in known
        )
    )
    patterns.write_text(
        "".join(
            json.dumps({"relation": "r", "pattern": pattern}) + "\n"
            for pattern in ("[X] is from [Y].", "[Y] is home to [X].")
        )
    )
    args = ["templates", source, patterns, "--out", out, "--licence", "CC BY-SA 4.0"]
    assert facts(*args, "--held-out", held_out) == 0
    assert sorted(record["text"] for record in json_lines(out)) == [
        "Ada is from London.",
        "London is home to Ada.",
    ]
    made = manifest_of(out)
    assert (made["held_out"]["left_out"], made["relations_without_pattern"]) == (2, ["other"])
    assert "facts: 2 sentences; 2 records" in capsys.readouterr().out
    assert facts(*args, "--num-patterns", 1) == 0
    assert len(json_lines(out)) == 2
    with pytest.raises(UserError, match="--num-patterns must be above 0"):
        facts(*args, "--num-patterns", 0)
    patterns.write_text('{"relation": "s", "pattern": "[X] is [Y]."}\n')
    with pytest.raises(UserError, match="no sentence is left to write"):
        facts(*args)


def test_factbook(tmp_path: Path):
    source, out = tmp_path / "f.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"country": "Fiji", "field": "Economy / Industries", "text": "sugar"}\n')
    assert facts("factbook", source, "--out", out, "--licence", "public domain") == 0
    assert json_lines(out) == [
        {
            "text": "Industries of Fiji: sugar.",
            "source_id": "Fiji#Economy / Industries",
            "title": "Fiji",
            "licence": "public domain",
            "style": "factbook",
        }
    ]


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data is not here")
def test_real_passages_and_real_held_out_subjects(tmp_path: Path):
    out = tmp_path / "facts.jsonl"
    passages = SHARED / "text" / "wiki-passages" / "data" / "validation-00000-of-00001.parquet"

    def lying(request: Request) -> Reply:
        text = restated(request.title, request.source)
        kind = sum(request.title.encode()) % 5
        return Reply([text, text.replace(" in turn", " in 987654 turns"), request.source][kind % 3])

    with serve(lying) as server:
        facts(
            "write", passages, "--out", out, "--endpoint", server.url, "--model", "tiny",
            "--held-out", SHARED / "facts" / "popqa_subset.jsonl", "--limit", 150,
        )  # fmt: skip
    made = manifest_of(out)
    counts = {rule: found["count"] for rule, found in made["rejected"].items()}
    assert made["held_out"]["left_out"] > 0
    assert made["questions"] == 150 - made["held_out"]["left_out"]
    assert counts["numbers"] > 30
    assert counts["copied share"] + counts["length"] > 20
    assert made["kept_texts"] == made["texts"] - sum(counts.values()) > 30
