import io
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.data.formats import parquet
from diffurefill.data.formats.footer import read_footer
from diffurefill.data.formats.marks import Mark
from diffurefill.data.storage.files import LocalFile
from tests.data.formats.handmade import (
    ENCODINGS,
    SMALL_PAGES,
    MemoryFile,
    data_page,
    file_of,
    plain,
    read,
    some_texts,
    texts_of,
    write,
)


def passing_over(file: MemoryFile, start: Mark) -> Iterator[parquet.Row]:
    """What read_rows falls back to for a flat column."""
    footer = read_footer(file)
    for group in range(start.row_group, footer.num_row_groups):
        first = start if group == start.row_group else Mark(group)
        yield from parquet._read_by_passing_over(file, footer.chunk(group, 0), first)


def read_by_pyarrow(file: MemoryFile) -> list[str | None]:
    return pq.read_table(io.BytesIO(file.content)).column("text").to_pylist()


def check_every_start(file: MemoryFile, texts: list[str | None]) -> None:
    rows = read(file)
    assert [text for text, _ in rows] == texts
    for place, (_, mark) in enumerate(rows):
        rest = read(file, mark)
        assert rest == rows[place + 1 :]


# --- what writers write ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["snappy", "zstd", "gzip", "lz4", "brotli", "none"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_rows_are_those_that_pyarrow_reads(codec: Any, encoding: str, version: Any) -> None:
    texts = some_texts(900)
    chosen = {"compression": codec, "data_page_version": version, **ENCODINGS[encoding]}
    file = write(texts, row_group_size=500, **SMALL_PAGES, **chosen)
    rows = read(file)
    assert [text for text, _ in rows] == texts == read_by_pyarrow(file)
    for place in (0, 7, 498, 499, 500, 777, 899):
        assert read(file, rows[place][1]) == rows[place + 1 :]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_reading_goes_on_after_every_row(encoding: str, version: Any) -> None:
    texts = some_texts(120)
    file = write(
        texts, row_group_size=70, data_page_version=version, **SMALL_PAGES, **ENCODINGS[encoding]
    )
    check_every_start(file, texts)


def test_a_mark_names_the_page_to_read_and_the_rows_before_it() -> None:
    file = write(some_texts(300), row_group_size=200, use_dictionary=False, **SMALL_PAGES)
    marks = [mark for _, mark in read(file)]
    assert [(mark.row_group, mark.row) for mark in marks] == [
        *((0, row + 1) for row in range(200)),
        *((1, row + 1) for row in range(100)),
    ]
    assert marks[199] == Mark(0, 200, 0, 0)
    assert marks[299] == Mark(1, 100, 0, 0)
    assert len({mark.offset for mark in marks}) > 5
    assert all(mark.offset_row <= mark.row for mark in marks)
    # At a page's end the mark is the next page's start, so that the page is not read for nothing.
    assert any(mark.offset_row == mark.row and mark.offset for mark in marks)


def test_batches_pages_and_groups_have_no_edges() -> None:
    """More rows than a batch, more pages than a run: stop around each edge (datasets #8145)."""
    texts = [f"{n:06} " * 60 for n in range(9000)]
    file = write(
        texts, row_group_size=5000, data_page_size=40_000, use_dictionary=False, compression="none"
    )
    rows = read(file)
    assert [text for text, _ in rows] == texts
    places = {0, 4999, 8999}
    for row, ((_, before), (_, after)) in enumerate(itertools.pairwise(rows)):
        if before.offset != after.offset or row % 256 == 0:
            places.add(row)
    sample = random.Random(3).sample(sorted(places), 20)
    for place in [0, 4999, 8999, *(max(p + shift, 0) for p in sample for shift in (-1, 0, 1))]:
        found = parquet.read_rows(file, "text", None, rows[place][1])
        assert list(itertools.islice(found, 300)) == rows[place + 1 : place + 301]


def test_four_legs_make_one_run() -> None:
    """A second resume starts from a mark that a resumed reader gave (datasets #8308)."""
    file = write(some_texts(400), row_group_size=150, **SMALL_PAGES)
    whole, found, mark = read(file), [], Mark()
    for count in (130, 30, 110, None):
        leg = list(itertools.islice(parquet.read_rows(file, "text", None, mark), count))
        found += leg
        mark = leg[-1][1]
    assert found == whole


@settings(max_examples=40)
@given(
    st.lists(st.none() | st.text(max_size=40), max_size=120),
    st.sampled_from(sorted(ENCODINGS)),
    st.sampled_from(["snappy", "zstd", "none"]),
    st.sampled_from(["1.0", "2.0"]),
    st.integers(1, 130),
    st.data(),
)
def test_both_ways_of_reading_agree(
    texts: list[str | None],
    encoding: str,
    codec: Any,
    version: Any,
    row_group_size: int,
    data: st.DataObject,
) -> None:
    file = write(
        pa.array(texts, pa.string()),
        data_page_size=50,
        write_batch_size=3,
        row_group_size=row_group_size,
        compression=codec,
        data_page_version=version,
        **ENCODINGS[encoding],
    )
    rows = read(file)
    assert [text for text, _ in rows] == texts == [text for text, _ in passing_over(file, Mark())]
    if rows:
        place = data.draw(st.integers(0, len(rows) - 1))
        mark = rows[place][1]
        rest = read(file, mark)
        assert rest == rows[place + 1 :]
        slowly = passing_over(file, mark._replace(offset=0, offset_row=0))
        assert [text for text, _ in slowly] == [text for text, _ in rest]
        # A mark without an offset says the same.
        assert read(file, Mark(mark.row_group, mark.row)) == rest


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
        pa.json_(),
    ],
)
def test_how_arrow_names_the_type_does_not_matter(kind: pa.DataType) -> None:
    texts = [None if n % 5 == 0 else f"{n % 7}" for n in range(300)]
    array = pa.array(texts).cast(kind) if kind != pa.json_() else pa.array(texts, kind)
    file = write(array, row_group_size=200, data_page_size=50, write_batch_size=10)
    assert texts_of(file) == texts
    assert [text for text, _ in passing_over(file, Mark())] == texts
    assert texts_of(write(array, store_schema=False)) == texts


@pytest.mark.parametrize(
    "chosen",
    [
        {"write_page_checksum": True},
        {"write_page_index": True},
        {"use_content_defined_chunking": True},
        {"bloom_filter_options": {"text": True}},
        {"write_statistics": False},
        {"version": "1.0"},
        {"sorting_columns": [pq.SortingColumn(0)]},
    ],
)
def test_what_else_a_file_may_hold_does_not_matter(chosen: dict[str, Any]) -> None:
    texts = some_texts(300)
    file = write(texts, row_group_size=200, **SMALL_PAGES, **chosen)
    rows = read(file)
    assert [text for text, _ in rows] == texts
    assert read(file, rows[77][1]) == rows[78:]


def test_the_column_is_found_among_others() -> None:
    texts = some_texts(100)
    table = pa.table(
        {
            "messages": [[{"role": "user", "text": "no"}]] * 100,
            "n": range(100),
            "meta": [{"text": "no", "n": 3}] * 100,
            "text": texts,
            "a.b": texts[::-1],
        }
    )
    file = write(table, row_group_size=40, **SMALL_PAGES)
    assert texts_of(file) == texts
    assert texts_of(file, column="a.b") == texts[::-1]


def test_row_groups_may_be_chosen() -> None:
    texts = some_texts(100)
    file = write(texts, row_group_size=10, **SMALL_PAGES)
    rows = list(parquet.read_rows(file, "text", [3, 7], Mark()))
    assert [text for text, _ in rows] == texts[30:40] + texts[70:80]
    assert list(parquet.read_rows(file, "text", [3, 7], rows[4][1])) == rows[5:]
    assert list(parquet.read_rows(file, "text", [3, 7], rows[9][1])) == rows[10:]
    assert list(parquet.read_rows(file, "text", [3, 7], rows[-1][1])) == []
    assert list(parquet.read_rows(file, "text", [3], Mark(5))) == []
    assert parquet.count_row_groups(file, "text") == 10


def test_files_and_row_groups_may_be_empty() -> None:
    file = write(pa.array([], pa.string()))
    assert read(file) == []
    assert parquet.count_row_groups(file, "text") in (0, 1)
    assert read(file_of([(0, []), (1, [data_page(1, plain("a"))]), (0, [])])) == [
        ("a", Mark(1, 1, 0, 0))
    ]


def test_invalid_utf8_is_replaced() -> None:
    file = file_of([(3, [data_page(3, plain([b"\xc3\x28", b"ok", b"\xf0\x9f"]))])])
    assert texts_of(file) == ["\ufffd(", "ok", "\ufffd"]
    assert [text for text, _ in passing_over(file, Mark())] == texts_of(file)


# --- nested columns -------------------------------------------------------------------------------


def test_lists_of_texts_are_joined_by_newlines() -> None:
    rows = [["a", "b"], None, [], ["c", None, "d"], [None]] * 25
    kinds = [pa.list_(pa.string()), pa.large_list(pa.large_string())]
    for kind, version in itertools.product(kinds, ["1.0", "2.0"]):
        array = pa.array(rows, kind)
        file = write(array, row_group_size=100, data_page_version=version, **SMALL_PAGES)
        check_every_start(file, ["a\nb", None, "", "c\nd", ""] * 25)


def test_messages_become_their_contents() -> None:
    one = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    rows = [one, None, [], [None, {"role": "user", "content": None}, *one]] * 70
    file = write(rows, row_group_size=100, **SMALL_PAGES)
    text = "Why?\n\nBecause."
    assert texts_of(file) == [text, None, "", text] * 70
    mark = read(file)[150][1]
    assert mark == Mark(1, 51, 0, 0)
    assert texts_of(file, mark) == texts_of(file)[151:]


def test_only_the_contents_are_read() -> None:
    long = "".join(map(str, range(50_000)))
    rows = [[{"role": str(n) + long, "content": "short"}] for n in range(20)]
    file = write(rows, compression="none")
    assert texts_of(file) == ["short"] * 20
    assert sum(file.reads) < len(long)


def test_nested_columns_are_read_a_megabyte_at_a_time() -> None:
    rows = [[f"{n}:{k * n}" for k in range(200)] for n in range(6000)]
    file = write(rows, compression="none", use_dictionary=False)
    assert file.size > 10_000_000
    next(parquet.read_rows(file, "text", None, Mark()))
    assert sum(file.reads) < 5_000_000


def test_a_content_that_lies_deeper_is_another() -> None:
    rows = [[{"a": {"content": "no"}, "content": "yes"}]]
    assert texts_of(write(rows)) == ["yes"]


def test_lists_as_old_writers_have_them() -> None:
    rows = [["a", "b"], None, ["c"]]
    assert texts_of(write(rows, use_compliant_nested_type=False)) == ["a\nb", None, "c"]


def test_invalid_utf8_in_lists_is_replaced() -> None:
    chosen: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
    file = write(pa.array([["abc"], ["def"]]), write_statistics=False, **chosen)
    file.content = file.content.replace(b"abc", b"a\xffc", 1)
    assert texts_of(file) == ["a\ufffdc", "def"]


# --- memory and bytes -----------------------------------------------------------------------------

PROCESS = """
import sys
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from diffurefill.data.formats import parquet
from diffurefill.data.storage.files import LocalFile
from diffurefill.data.formats.marks import Mark

def peak_mb():  # ru_maxrss would count the parent's memory too
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6

class Counted(LocalFile):
    num_bytes = 0
    def read_at(self, offset, length):
        data = super().read_at(offset, length)
        self.num_bytes += len(data)
        return data

path = sys.argv[2]
"""
WRITE = """
words = np.array(["%x" % (n * n) for n in range(4000)])
text = " ".join(words[np.random.Generator(np.random.Philox(key=1)).integers(0, 4000, 200_000)])
texts = [f"{n} " + text[n * 7 : n * 7 + 4000] for n in range(100_000)]
table = pa.table({"text": texts})
pq.write_table(
    table, path, row_group_size=100_000, compression="zstd", compression_level=1,
    use_dictionary=False,
)
"""
READ = """
file = Counted(path)
rows = parquet.read_rows(file, "text", None, Mark())
next(rows)
first = file.num_bytes
count = 1
for text, mark in rows:
    count += 1
    if mark.offset:
        last = mark
read = Counted(path)
rest = sum(1 for _ in parquet.read_rows(read, "text", None, last))
print(count, int(peak_mb()), first, rest, read.num_bytes)
"""
READ_BY_DEFAULT = """
for batch in pq.ParquetFile(path).iter_batches():
    batch.column(0).to_pylist()
print(int(peak_mb()))
"""


def _run(code: str, path: Path) -> list[int]:
    command = [sys.executable, "-c", "import sys; exec(sys.argv[1])", PROCESS + code, str(path)]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return [int(word) for word in output.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's VmHWM")
def test_memory_stays_far_below_a_row_group(tmp_path: Path) -> None:
    """400 MB of text in one row group; a change of pyarrow's defaults must show here."""
    path = tmp_path / "big.parquet"
    _run(WRITE, path)
    count, peak_mb, first_bytes, rest, rest_bytes = _run(READ, path)
    assert count == 100_000
    assert peak_mb < 200
    assert first_bytes < 1_000_000
    assert rest == 1
    assert rest_bytes < 5_000_000
    assert _run(READ_BY_DEFAULT, path)[0] > 400


def test_a_file_on_the_disk_is_read(tmp_path: Path) -> None:
    texts = some_texts(100)
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    file = LocalFile(tmp_path / "a.parquet")
    assert [text for text, _ in parquet.read_rows(file, "text", None, Mark())] == texts
    file.close()
