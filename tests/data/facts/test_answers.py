"""The file of answers outlives kills."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.data.facts.answers import Answers


def stored(path: Path, *keys: str) -> None:
    answers = Answers(path)
    for key in keys:
        answers.add({"key": key, "text": f"Text of {key}\nété"})
    answers.close()


def opened(path: Path) -> Answers:
    answers = Answers(path)
    answers.close()
    return answers


def test_what_was_added_is_there_for_the_next_process(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    stored(path, "a", "b")
    stored(path, "c")
    answers = opened(path)
    assert [key in answers for key in "abcd"] == [True, True, True, False]
    assert len(answers) == 3
    assert answers.get("b") == {"key": "b", "text": "Text of b\nété"}
    assert answers.get("d") is None


@pytest.mark.parametrize("lost", [1, 2, 20])
def test_a_line_that_a_kill_cut_off_is_removed_and_the_file_goes_on(tmp_path: Path, lost: int):
    path = tmp_path / "answers.jsonl"
    stored(path, "a", "b")
    path.write_bytes(path.read_bytes()[:-lost])
    stored(path, "c")
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "c"]


@pytest.mark.parametrize("damage", ['{"text": "no key"}', "{", "[1]"])
def test_damage_in_the_middle_names_its_line(tmp_path: Path, damage: str):
    path = tmp_path / "answers.jsonl"
    path.write_text(f'{{"key": "a"}}\n{damage}\n{{"key": "b"}}\n')
    with pytest.raises(UserError, match="line 2: not an answer; remove the line"):
        Answers(path)


def test_of_two_answers_to_one_question_the_first_counts(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"key": "a", "text": 1}\n{"key": "a", "text": 2}\n')
    answers = opened(path)
    assert answers.get("a") == {"key": "a", "text": 1}
    assert len(answers) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="name another --out"):
        Answers(tmp_path / "missing" / "answers.jsonl")


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = Answers(tmp_path / "answers.jsonl")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match="No space left on device; free some space"):
            answers.add({"key": "a"})
    assert "a" not in answers
    answers.close()
