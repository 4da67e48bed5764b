"""PopQA's questions as statements, and its rules for a right answer. Text only.

Source: Mallen et al. 2023 (arXiv:2212.10511); templates: spec algorithms 4.2, ours.
"""

from __future__ import annotations

import csv
import json
import re
import string
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffurefill.config import UserError

STEMS = {
    "occupation": "The occupation of {} is",
    "place of birth": "{} was born in",
    "genre": "The genre of {} is",
    "father": "The father of {} is",
    "country": "{} is located in",
    "producer": "{} was produced by",
    "director": "{} was directed by",
    "capital of": "{} is the capital of",
    "screenwriter": "The screenplay of {} was written by",
    "composer": "The music of {} was composed by",
    "color": "The color of {} is",
    "religion": "The religion of {} is",
    "sport": "The sport of {} is",
    "author": "{} was written by",
    "mother": "The mother of {} is",
    "capital": "The capital of {} is",
}
"""By relation: what stands before the answer. No article does, which would give it away (a, an)."""

PEOPLE = ("father", "mother", "producer", "director", "screenwriter", "composer", "author")
PLACES = ("place of birth", "country", "capital of", "capital")

_COLUMNS = ("subj", "prop", "obj", "possible_answers")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """One row of PopQA. `accepted` holds every right answer, `answer` among them."""

    relation: str
    subject: str
    answer: str
    accepted: tuple[str, ...]

    @property
    def stem(self) -> str:
        return STEMS[self.relation].format(self.subject)

    def sentence(self, answer: str) -> str:
        return f"{self.stem} {answer}."


def answer_type(relation: str) -> str:
    """Relations of one type have answers that could be each other's."""
    if relation in PEOPLE:
        return "person"
    return "place" if relation in PLACES else relation


def read_questions(path: Path) -> list[Question]:
    """The official popQA.tsv, or JSONL with its columns. Raises UserError, with the line, for what
    is neither."""
    if not path.is_file():
        raise UserError(f"no file {path}: give PopQA's popQA.tsv, or JSONL with its columns")
    is_table = path.suffix.lower() in (".tsv", ".csv")
    try:
        rows = _table(path) if is_table else _records(path)
        questions = [_question(row, f"{path}, row {at}") for at, row in enumerate(rows, 1)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a table of PopQA: {error}") from None
    if not questions:
        raise UserError(f"{path} holds no question")
    return questions


def _table(path: Path) -> Iterator[Mapping[str, Any]]:
    # Excel begins its tables with a byte order mark, which is no part of the first column's name.
    with open(path, encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, delimiter="," if path.suffix.lower() == ".csv" else "\t")


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    with open(path, encoding="utf-8-sig") as file:
        for at, line in enumerate(filter(str.strip, file), 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise UserError(f"{path}, row {at} is not a JSON object")
            yield row


def _question(row: Mapping[str, Any], where: str) -> Question:
    missing = [name for name in _COLUMNS if not row.get(name)]
    if missing:
        raise UserError(
            f"{where} has no {', '.join(missing)}: PopQA's columns are {', '.join(_COLUMNS)}"
        )
    for name in _COLUMNS[:3]:
        if not isinstance(row[name], str):
            raise UserError(f"{where}: {name} is not a text")
    relation, accepted = row["prop"], row["possible_answers"]
    if relation not in STEMS:
        raise UserError(f"{where}: there is no sentence for the relation {relation!r}")
    try:
        accepted = json.loads(accepted) if isinstance(accepted, str) else accepted
        return Question(relation, row["subj"], row["obj"], tuple(map(str, accepted)))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{where}: possible_answers is not a list of answers") from None


def normalised(text: str) -> str:
    """Lower case without punctuation and articles, spaces collapsed (SQuAD's rule)."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def is_exact(text: str, accepted: Collection[str]) -> bool:
    """Whether `text` is one of the accepted answers."""
    return normalised(text) in {normalised(answer) for answer in accepted}


def contains(text: str, accepted: Collection[str]) -> bool:
    """PopQA's own metric: an accepted answer stands in the first line of what was written, as it
    is, lower-cased or capitalised."""
    line = text.lstrip("\n").partition("\n")[0]
    forms = (form for a in accepted for form in (a, a.lower(), a.capitalize()))
    return any(form in line for form in forms)
