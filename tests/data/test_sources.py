import json
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data.sources import (
    MAX_DOCUMENT_CHARS,
    PART_CHARS,
    group,
    list_units,
    read_texts,
    top_level_parts,
)


def texts_of(source: Path | str) -> list[str]:
    return [text for unit in list_units(str(source), "text") for text in read_texts(unit, "text")]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- the Python library --------------------------------------------------------------------------


def test_the_library_is_read_without_tests_packages_and_generated_tables() -> None:
    units = list_units("python:", "text")
    names = [unit.name.split("/", 1)[1] for unit in units]
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "encodings"})
    assert names == [name for name in names if not name.startswith("_sysconfigdata")]
    assert all(unit.name.startswith(f"python-{sys.version.split()[0]}/") for unit in units)


def test_a_module_of_the_library_comes_whole_or_in_parts_that_join_to_it() -> None:
    unit = next(u for u in list_units("python:", "text") if u.name.endswith("/argparse.py"))
    parts = list(read_texts(unit, "text"))
    assert len(parts) > 3
    assert "".join(parts) == unit.path.read_text("utf-8")


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
    assert texts_of(path) == ["One.\n\nTwo.\n"]


def test_a_byte_order_mark_and_windows_line_ends_are_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfOne.\r\nTwo.\r\n")
    assert texts_of(path) == ["One.\nTwo.\n"]


def test_a_long_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    text = "\n".join(f"Paragraph {n}. " + "word " * 200 + "\n" for n in range(40))
    documents = texts_of(write(tmp_path / "a.txt", text))
    assert len(documents) > 4
    assert "".join(documents) == text
    assert all(d.endswith("\n\n") for d in documents[:-1])
    assert all(PART_CHARS / 2 < len(d) <= PART_CHARS for d in documents[:-1])


def test_a_text_without_any_line_end_is_cut_at_the_longest_length(tmp_path: Path) -> None:
    text = "x" * (2 * MAX_DOCUMENT_CHARS + 5)
    documents = texts_of(write(tmp_path / "a.txt", text))
    assert [len(d) for d in documents] == [MAX_DOCUMENT_CHARS, MAX_DOCUMENT_CHARS, 5]


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"\xff\xfe\xfa"])
def test_a_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "a.bin", content)
    with pytest.raises(UserError, match="no UTF-8 text"):
        list_units(str(path), "text")


def test_a_character_across_the_sniffed_bytes_is_still_text(tmp_path: Path) -> None:
    text = "x" * 65_535 + "\u00e9"
    assert texts_of(write(tmp_path / "a.txt", text)) == [text]


def test_bad_bytes_further_down_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x" * 70_000 + b"\xff")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 throughout"):
        texts_of(path)


def test_a_compressed_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.xz", b"\xfd7zXZ\0")
    with pytest.raises(UserError, match="compressed: unpack it first"):
        list_units(str(path), "text")


# --- JSONL ---------------------------------------------------------------------------------------


def test_jsonl_skips_null_blank_and_empty_lines(tmp_path: Path) -> None:
    rows = ['{"text": "a"}', "", '{"text": null}', '{"text": " \\n"}', '{"text": "b", "n": 1}']
    assert texts_of(write(tmp_path / "a.jsonl", "\n".join(rows))) == ["a", "b"]


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson", r'{"text": "a\ud83d b \ud83d\ude00"}')
    assert texts_of(path) == ["a\ufffd b \U0001f600"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"a\.jsonl:2 is not valid JSON"),
        ("[1]", r"a\.jsonl:2 is no JSON object"),
        ('{"title": 1, "body": 2}', r"a\.jsonl:2 has no field 'text'.*title, body"),
        ('{"text": 3}', r"a\.jsonl:2: field 'text' is no text"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
    with pytest.raises(UserError, match=message):
        texts_of(path)


def test_a_wrong_column_shows_when_the_source_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"body": "x"}))
    with pytest.raises(UserError, match="has no field 'text'"):
        list_units(str(path), "text")


# --- folders, globs, Parquet ---------------------------------------------------------------------


def test_a_folder_is_every_readable_file_below_it_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.md", "z")
    write(tmp_path / "a" / "c.jsonl", '{"text": "c"}')
    for hidden in (".git/x.txt", "__pycache__/y.py", "image.png", "a/binary.txt"):
        write(tmp_path / hidden, b"\0\xff")
    assert texts_of(tmp_path) == ["c", "z", "b"]


def test_a_hub_layout_gives_its_train_files_alone(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write(root / "README.md", "about")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-0", "test-0"):
        path = write(root / "data" / f"{name}.parquet", b"")
        pq.write_table(pa.table({"text": [name]}), path)
    train = ["train-00000-of-00002", "train-00001-of-00002"]
    assert texts_of(root) == texts_of(root / "data") == texts_of(tmp_path) == train


def test_each_row_group_is_a_unit(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"t{n}" for n in range(10)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=4)
    assert [unit.row_group for unit in list_units(str(path), "text")] == [0, 1, 2]
    assert texts_of(path) == texts


def test_a_glob_is_its_matches_in_order(tmp_path: Path) -> None:
    for name in "cab":
        write(tmp_path / f"{name}.txt", name)
    assert texts_of(tmp_path / "*.txt") == ["a", "b", "c"]


def test_a_name_with_brackets_that_exists_is_no_glob(tmp_path: Path) -> None:
    assert texts_of(write(tmp_path / "a[1].txt", "x")) == ["x"]


@pytest.mark.parametrize(
    ("name", "message"), [("nothing.txt", "no such file or folder"), ("*.txt", "no file matches")]
)
def test_a_source_that_is_not_there_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list_units(str(tmp_path / name), "text")
