import codecs
import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import Source, UserError
from diffurefill.data.documents import documents_of_row, texts_of
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.rows import (
    MAX_DOCUMENT_CHARS,
    PART_CHARS,
    group,
    read_rows,
    top_level_parts,
)
from diffurefill.data.sources import SourceText, open_source
from diffurefill.data.storage.files import LocalFile
from diffurefill.data.storage.listing import File
from diffurefill.data.units import Unit


def open_path(path: Path | str, num_slots: int = 1000) -> SourceText:
    return open_source(Source(paths=(str(path),)), num_slots)


def texts(path: Path | str) -> list[str]:
    return list(texts_of(open_path(path)))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def only_unit(path: Path) -> Unit:
    (unit,) = open_path(path).units
    return unit


def assert_resumes_everywhere(unit: Unit) -> None:
    """Reading from any mark gives the rows after it."""
    rows = list(read_rows(unit, "text", Mark()))
    assert len(rows) > 3
    for done, (_, mark) in enumerate(rows, start=1):
        assert list(read_rows(unit, "text", mark)) == rows[done:]


# --- the Python library --------------------------------------------------------------------------


def test_the_library_is_read_without_tests_packages_and_generated_tables() -> None:
    units = open_path("python:").units
    names = [unit.name.split("/", 1)[1] for unit in units]
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "encodings"})
    assert names == [name for name in names if not name.startswith("_sysconfigdata")]
    assert all(unit.name.startswith(f"python-{sys.version.split()[0]}/") for unit in units)


def test_a_module_of_the_library_comes_whole_or_in_parts_that_join_to_it() -> None:
    unit = next(u for u in open_path("python:").units if u.name.endswith("/argparse.py"))
    parts = [text for text, _ in read_rows(unit, "text", Mark())]
    assert len(parts) > 3
    assert "".join(part or "" for part in parts) == Path(unit.file.uri).read_text("utf-8")
    assert_resumes_everywhere(unit)


MODULE = '''"""Doc."""
import os

# about f
@decorate(
    1,
)
def f():
    # inside
    return 1

x = 1

class A:
    def method(self):
        pass

async def g():
    pass
'''


def test_a_cut_keeps_decorators_and_leading_comments_with_their_definition() -> None:
    parts = top_level_parts(MODULE)
    starts = [part.splitlines()[0] for part in parts]
    assert starts == ['"""Doc."""', "# about f", "class A:", "async def g():"]
    assert parts[1].startswith("# about f\n@decorate(\n    1,\n)\ndef f():")


lines = st.sampled_from(["def f():", "@a", "# c", "class B:", "x = 1", "    y", ")", "", "\x0c"])


@given(st.lists(lines).map("\n".join))
def test_top_level_parts_join_to_the_module(text: str) -> None:
    parts = top_level_parts(text)
    assert "".join(parts) == text
    assert all(parts)


@given(st.lists(st.text(min_size=1, max_size=30)), st.integers(1, 40))
def test_groups_hold_every_part_in_order_and_are_as_full_as_they_can_be(
    parts: list[str], max_chars: int
) -> None:
    groups = list(group(parts, max_chars))
    assert "".join(groups) == "".join(parts)
    assert all(len(g) <= max_chars or g in parts for g in groups)
    for left, right in pairwise(groups):
        first = next(part for part in parts if right.startswith(part))
        assert len(left) + len(first) > max_chars or len(left) + len(right) > max_chars


# --- text files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "a.py", "a.log", "NOTES"])
def test_a_short_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "One.\n\nTwo.\n")
    assert texts(path) == ["One.\n\nTwo.\n"]


def test_a_byte_order_mark_and_windows_line_ends_are_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfOne.\r\nTwo.\r\n")
    assert texts(path) == ["One.\nTwo.\n"]


def test_a_long_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    text = "\n".join(f"Paragraph {n}. " + "word " * 200 + "\n" for n in range(40))
    documents = texts(write(tmp_path / "a.txt", text))
    assert len(documents) > 4
    assert "".join(documents) == text
    assert all(d.endswith("\n\n") for d in documents[:-1])
    assert all(PART_CHARS / 2 < len(d) <= PART_CHARS for d in documents[:-1])


def test_a_text_without_any_line_end_is_cut_at_the_longest_length(tmp_path: Path) -> None:
    text = "x" * (2 * MAX_DOCUMENT_CHARS + 5)
    documents = texts(write(tmp_path / "a.txt", text))
    assert [len(d) for d in documents] == [MAX_DOCUMENT_CHARS, MAX_DOCUMENT_CHARS, 5]


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"\xff\xfe\xfa"])
def test_a_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "a.bin", content)
    with pytest.raises(UserError, match="no UTF-8 text"):
        open_path(path)


def test_a_binary_file_among_many_is_refused(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path / f"{number}.log", "text" if number != 5 else b"\x7fELF\0\xff")
    with pytest.raises(UserError, match=r"5\.log is no UTF-8 text"):
        open_path(tmp_path / "*.log", num_slots=1)


def test_a_character_across_the_sniffed_bytes_is_still_text(tmp_path: Path) -> None:
    text = "x" * 65_535 + "\u00e9"
    assert texts(write(tmp_path / "a.txt", text)) == [text]


def test_bad_bytes_further_down_become_replacement_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x" * 70_000 + b"\xff!")
    assert texts(path) == ["x" * 70_000 + "\ufffd!"]


LINES = ["One.", "", "  ", "\u00e9t\u00e9", "x" * 3_000, "word " * 1_000, "\u6771" * 4_000]


@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_text_resumes_at_every_part(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], line_end: str
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + line_end.join(lines).encode())
    rows = list(read_rows(Unit(File(str(path), "a.txt", 0), "text"), "text", Mark()))
    assert "".join(text or "" for text, _ in rows) == "\n".join(lines)
    for done, (_, mark) in enumerate(rows, start=1):
        unit = Unit(File(str(path), "a.txt", 0), "text")
        assert list(read_rows(unit, "text", mark)) == rows[done:]


def test_a_line_of_millions_of_characters_is_cut_between_characters(tmp_path: Path) -> None:
    text = "\u6771\u4eac" * 400_000
    path = write(tmp_path / "a.txt", text)
    assert "".join(texts(path)) == text
    assert_resumes_everywhere(only_unit(path))


def test_a_compressed_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.xz", b"\xfd7zXZ\0")
    with pytest.raises(UserError, match="compressed: unpack it first"):
        open_path(path)


# --- JSONL ---------------------------------------------------------------------------------------


def test_jsonl_skips_null_blank_and_empty_lines(tmp_path: Path) -> None:
    rows = ['{"text": "a"}', "", '{"text": null}', '{"text": " \\n"}', '{"text": "b", "n": 1}']
    assert texts(write(tmp_path / "a.jsonl", "\n".join(rows))) == ["a", "b"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_jsonl(tmp_path: Path, name: str) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % n for n in range(4))
    content = (codecs.BOM_UTF8 + lines) * 2 + codecs.BOM_UTF8  # two such files joined
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    assert texts(path) == [*"0123", *"0123"]
    assert_resumes_everywhere(only_unit(path))


def test_jsonl_resumes_at_every_line_and_reads_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["", *(json.dumps({"text": "\u00e9" * n}) for n in range(40)), '{"text": null}']
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    unit = only_unit(path)
    assert_resumes_everywhere(unit)
    *_, (_, last) = read_rows(unit, "text", Mark())
    *_, (_, middle) = list(read_rows(unit, "text", Mark()))[:30]
    offsets = []
    real = LocalFile.read_at

    def noted(self: LocalFile, offset: int, length: int) -> bytes:
        offsets.append(offset)
        return real(self, offset, length)

    monkeypatch.setattr(LocalFile, "read_at", noted)
    assert list(read_rows(unit, "text", middle))[-1][1] == last
    assert min(offsets) == middle.offset > 0


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_jsonl_is_read_and_resumes(tmp_path: Path, ending: str) -> None:
    content = "\n".join(json.dumps({"text": f"text {n}"}) for n in range(50)).encode()
    codec = {"gz": "gzip", "zst": "zstd"}[ending]
    half = len(content) // 2
    packed = [pa.compress(part, codec, asbytes=True) for part in (content[:half], content[half:])]
    path = write(tmp_path / f"a.jsonl.{ending}", b"".join(packed))  # members one after the other
    assert texts(path) == [f"text {n}" for n in range(50)]
    assert_resumes_everywhere(only_unit(path))


def test_damaged_compressed_jsonl_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"text": "abc"}\n' * 1000))
    packed[20:40] = bytes(20)
    path = write(tmp_path / "a.jsonl.gz", bytes(packed))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is damaged"):
        texts(path)


def test_bytes_that_are_no_text_do_not_end_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a\xffb"}\n{"text": "c"}')
    assert texts(path) == ["a\ufffdb", "c"]


def test_a_huge_row_is_cut_into_documents() -> None:
    parts = list(documents_of_row("word " * 100_000))
    assert "".join(parts) == "word " * 100_000
    assert max(map(len, parts)) == MAX_DOCUMENT_CHARS


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson", r'{"text": "a\ud83d b \ud83d\ude00"}')
    assert texts(path) == ["a\ufffd b \U0001f600"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"a\.jsonl:2 is not valid JSON"),
        ("[" * 100_000, r"a\.jsonl:2 is not valid JSON"),
        ("[1]", r"a\.jsonl:2 is no JSON object"),
        ('{"title": 1, "body": 2}', r"a\.jsonl:2 has no field 'text'.*title, body"),
        ('{"text": 3}', r"a\.jsonl:2: field 'text' is no text"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
    with pytest.raises(UserError, match=message):
        texts(path)


def test_a_wrong_column_shows_when_the_source_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"body": "x"}))
    with pytest.raises(UserError, match="has no field 'text'"):
        open_path(path)


# --- folders, globs, Parquet ---------------------------------------------------------------------


def test_a_folder_is_every_readable_file_below_it_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.md", "z")
    write(tmp_path / "a" / "c.jsonl", '{"text": "c"}')
    for hidden in (".git/x.txt", "__pycache__/y.py", "image.png", "a/binary.txt"):
        write(tmp_path / hidden, b"\0\xff")
    assert texts(tmp_path) == ["c", "z", "b"]


def test_a_hub_layout_gives_its_train_files_alone(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write(root / "README.md", "about")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-0", "test-0"):
        path = write(root / "data" / f"{name}.parquet", b"")
        pq.write_table(pa.table({"text": [name]}), path)
    train = ["train-00000-of-00002", "train-00001-of-00002"]
    assert texts(root) == texts(root / "data") == texts(tmp_path) == train


def test_each_row_group_is_a_unit(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    expected = [f"t{n}" for n in range(10)]
    pq.write_table(pa.table({"text": expected}), path, row_group_size=4)
    assert [unit.row_group for unit in open_path(path).units] == [0, 1, 2]
    assert texts(path) == expected


def test_a_glob_is_its_matches_in_order(tmp_path: Path) -> None:
    for name in "cab":
        write(tmp_path / f"{name}.txt", name)
    assert texts(tmp_path / "*.txt") == ["a", "b", "c"]


def test_a_name_with_brackets_that_exists_is_no_glob(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a[1].txt", "x")) == ["x"]


@pytest.mark.parametrize(
    ("name", "message"), [("nothing.txt", "no such file or folder"), ("*.txt", "no file matches")]
)
def test_a_source_that_is_not_there_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_path(tmp_path / name)


def test_with_many_files_a_unit_is_a_whole_file(tmp_path: Path) -> None:
    for name in range(8):
        table = pa.table({"text": [f"{name} {n}" for n in range(10)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4)
    source = open_path(tmp_path, num_slots=2)
    assert [unit.row_group for unit in source.units] == [None] * 8
    assert [text for text in texts_of(source) if text.startswith("3")] == [
        f"3 {n}" for n in range(10)
    ]
    assert len(open_path(tmp_path, num_slots=3).units) == 8 * 3


def test_the_library_stands_alone_in_a_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    with pytest.raises(UserError, match="make it a second source"):
        open_source(Source(paths=("python:", str(path))), 1)
