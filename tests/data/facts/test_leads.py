"""Documents with ids from JSONL and Parquet, and lists of subjects."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffurefill.config import UserError
from diffurefill.data.facts.leads import Lead, LeadFiles, excerpt, read_subjects, subject_name


def leads_of(*paths: Path, licence: str = "unknown", limit: int | None = None) -> list[Lead]:
    return list(LeadFiles(paths, licence, limit))


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_record_may_have_everything_or_only_a_text(tmp_path: Path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"id": 7, "title": "Rome", "text": "A city.", "licence": "CC0"},
        {"text": "é", "license": "MIT"},
        {"text": " \n"},
        {"text": None},
        {"text": "half \ud800"},
    )
    sha = hashlib.sha256("é".encode()).hexdigest()
    named = leads_of(path, licence="CC BY-SA 4.0")
    assert named[:2] == [Lead("7", "Rome", "A city.", "CC0"), Lead(sha, "", "é", "MIT")]
    assert named[2][1:] == ("", "half ?", "CC BY-SA 4.0")


def test_a_folder_gives_its_files_in_order_and_a_limit_ends_them(tmp_path: Path):
    table = pa.table({"title": ["c", None], "text": ["text c", "text d"], "other": [1, 2]})
    pq.write_table(table, tmp_path / "2.parquet")
    with gzip.open(tmp_path / "1.jsonl.gz", "wt") as file:
        file.write('{"title": "b", "text": "text b"}\n\n')
    write_lines(tmp_path / "0.jsonl", {"title": "a", "text": "text a"})
    (tmp_path / "README.md").write_text("no data")
    files = LeadFiles((tmp_path,), limit=None)
    assert [lead.title for lead in files] == ["a", "b", "c", ""]
    assert list(files) == list(files)
    assert [lead.title for lead in leads_of(tmp_path, limit=3)] == ["a", "b", "c"]
    assert leads_of(tmp_path, limit=0) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2: not a JSON object; mend the line"),
        ("[1]\n", "line 1: not a JSON object"),
        ('{"title": "a"}\n', "a record has no text; it needs a field text"),
        (b"\xff\xfe\n", "cannot read .* save it as UTF-8"),
        ("[" * 100_000, "line 1: not a JSON object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str | bytes, message: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=message):
        leads_of(path)


def test_files_that_are_missing_empty_or_something_else(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        leads_of(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no file that ends in"):
        leads_of(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"not a Parquet file")
    (tmp_path / "a.jsonl.gz").write_bytes(b"not a gzip file")
    packed = gzip.compress(json.dumps({"text": "a" * 99}).encode())
    (tmp_path / "b.jsonl.gz").write_bytes(packed[:10] + b"\xff" * 8 + packed[18:])
    (tmp_path / "c.jsonl.gz").write_bytes(packed[:-9])
    for name in ("a.parquet", "a.jsonl.gz", "b.jsonl.gz", "c.jsonl.gz"):
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            leads_of(tmp_path / name)


def test_a_long_text_is_cut_after_a_sentence():
    text = 'One two three. He said: "Four five." Six seven eight nine.'
    assert excerpt(text, 99) == text
    assert excerpt(text, 11) == text
    assert excerpt(text, 10) == 'One two three. He said: "Four five."'
    assert excerpt(text, 5) == "One two three."
    assert excerpt(text, 2) == "One two"


def test_names_of_one_subject_are_the_same():
    assert subject_name("Frozen (2013 film) ") == subject_name("frozen") == "frozen"
    assert subject_name("(I Can't Get No) Satisfaction") == "(i can't get no) satisfaction"


def test_lists_of_subjects(tmp_path: Path):
    plain = tmp_path / "names.txt"
    plain.write_text("Rome\n\nPu Yi (emperor)\n")
    popqa = write_lines(tmp_path / "popqa.jsonl", {"subj": "Rome", "obj": "x"}, {"title": "Pu Yi"})
    assert read_subjects(plain) == read_subjects(popqa) == {"rome", "pu yi"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "Paris\r\nRo\u2028me\n"),
        ("a.jsonl", '{"subj": "Paris"}\n{"subj": "Ro\u2028me"}\n'),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_name_and_lines_end_at_line_ends_alone(
    tmp_path: Path, name: str, content: str
):
    (tmp_path / name).write_bytes(content.encode("utf-8-sig"))
    assert read_subjects(tmp_path / name) == {"paris", "ro\u2028me"}


def test_a_list_without_subjects_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such list"):
        read_subjects(tmp_path / "none")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="names no subject"):
        read_subjects(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("Orléans\n".encode("latin-1"))
    with pytest.raises(UserError, match="save it as UTF-8"):
        read_subjects(tmp_path / "latin.txt")
    with pytest.raises(UserError, match="none of the fields subj"):
        read_subjects(write_lines(tmp_path / "a.jsonl", {"name": "Rome"}))
