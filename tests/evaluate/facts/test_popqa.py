"""PopQA's rows, our sentences and both rules for a right answer, against cases worked by hand."""

import codecs
import csv
import json
from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.evaluate.facts.popqa import (
    STEMS,
    Question,
    answer_type,
    contains,
    is_exact,
    normalised,
    read_questions,
)

ROW = {
    "subj": "George Rankin",
    "prop": "occupation",
    "obj": "politician",
    "possible_answers": ["politician", "political leader"],
}


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def write_tsv(path: Path, *rows: dict) -> Path:
    """As pandas writes the official file: the answers are JSON in a quoted cell."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", *ROW], delimiter="\t", lineterminator="\n")
        writer.writeheader()
        for at, row in enumerate(rows):
            cell = json.dumps(row["possible_answers"])
            writer.writerow({"id": at, **row, "possible_answers": cell})
    return path


@pytest.mark.parametrize(
    ("relation", "answer", "text"),
    [
        ("occupation", "actor", "The occupation of Ann is actor."),
        ("place of birth", "Rome", "Ann was born in Rome."),
        ("capital of", "Peru", "Ann is the capital of Peru."),
        ("capital", "Lima", "The capital of Ann is Lima."),
        ("screenwriter", "Bo Li", "The screenplay of Ann was written by Bo Li."),
        ("sport", "golf", "The sport of Ann is golf."),
    ],
)
def test_a_question_is_said_as_a_sentence(relation: str, answer: str, text: str) -> None:
    assert Question(relation, "Ann", answer, (answer,)).sentence(answer) == text


def test_there_are_sixteen_sentences_and_none_ends_with_an_article() -> None:
    assert len(STEMS) == 16
    assert not [stem for stem in STEMS.values() if stem.split()[-1] in ("a", "an", "the")]


def test_answers_of_one_type_may_stand_for_each_other() -> None:
    assert answer_type("mother") == answer_type("author") == "person"
    assert answer_type("capital") == answer_type("country") == "place"
    assert answer_type("color") == "color"


def test_both_kinds_of_file_are_read_alike(tmp_path: Path) -> None:
    expected = [
        Question("occupation", "George Rankin", "politician", tuple(ROW["possible_answers"]))
    ]
    assert read_questions(write_jsonl(tmp_path / "q.jsonl", ROW)) == expected
    assert read_questions(write_tsv(tmp_path / "popQA.tsv", ROW)) == expected


@pytest.mark.parametrize("name", ["q.jsonl", "q.tsv"])
def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write = write_jsonl if name.endswith("jsonl") else write_tsv
    lines = write(path, ROW, ROW).read_bytes().replace(b"\n", b"\n\n")
    path.write_bytes(codecs.BOM_UTF8 + lines + b"\n\n")
    assert len(read_questions(path)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"subj": "A", "prop": "occupation", "obj": "b"}, "row 2 has no possible_answers"),
        ({"question": "who?"}, "has no subj, prop, obj, possible_answers"),
        ({**ROW, "prop": "shoe size"}, "no sentence for the relation 'shoe size'"),
        ({**ROW, "possible_answers": "politician"}, "not a list of answers"),
        ({**ROW, "prop": ["occupation"]}, "row 2: prop is not a text"),
        ({**ROW, "subj": 1984}, "row 2: subj is not a text"),
        ({**ROW, "obj": ["politician"]}, "row 2: obj is not a text"),
        (["a", "list"], "row 2 is not a JSON object"),
    ],
)
def test_odd_rows_are_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_questions(write_jsonl(tmp_path / "q.jsonl", ROW, row))


def test_a_file_that_is_missing_empty_or_binary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"popQA\.tsv"):
        read_questions(tmp_path / "none.tsv")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="no question"):
        read_questions(tmp_path / "empty.jsonl")
    (tmp_path / "photo.tsv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(UserError, match="not a table"):
        read_questions(tmp_path / "photo.tsv")


def test_answers_are_compared_by_the_rule_of_squad() -> None:
    assert normalised("The  Beatles, a band!") == "beatles band"
    assert is_exact(" the U.S.A. ", ["USA", "America"])
    assert not is_exact("United States", ["USA"])
    assert not is_exact("USA today", ["USA"])


def test_containment_is_that_of_popqa() -> None:
    assert contains("a politician and soldier.", ["politician"])
    assert contains("Politician.", ["politician"])  # capitalised
    assert contains("the rock", ["Rock"])  # lower-cased
    assert not contains("POLITICIAN", ["politician"])
    assert not contains("a soldier\nand politician", ["politician"])  # the first line only
    assert contains("\n\npolitician", ["politician"])
