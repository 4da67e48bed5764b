import itertools
from typing import Any

import pyarrow as pa
import pytest

from diffurefill.config import UserError
from diffurefill.data.formats import pages
from diffurefill.data.formats.footer import Chunk, Damage, read_footer
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.pages import DATA, DICTIONARY, PageReader, UnreadableHeader, walk
from diffurefill.data.formats.thrift import I64
from tests.data.formats.handmade import (
    GZIP,
    NONE,
    OPTIONAL_TEXT,
    RLE_DICTIONARY,
    MemoryFile,
    data_page,
    dictionary_page,
    file_of,
    gzip_page,
    levels,
    page,
    page_left_as_it_is,
    plain,
    read,
    sized,
    texts_of,
    write,
)

SMALL_PAGES: dict[str, Any] = {"data_page_size": 1000, "write_batch_size": 8}


def chunk_of(file: MemoryFile, row_group: int = 0) -> Chunk:
    return read_footer(file).chunk(row_group, 0)


def numbered(count: int) -> list[str]:
    return [f"text {n} " * (n % 9) for n in range(count)]


# --- the walk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_walk_sees_every_page_of_a_row_group_and_no_more(version: Any) -> None:
    settings = SMALL_PAGES | {"dictionary_pagesize_limit": 1000, "data_page_version": version}
    file = write(numbered(900), row_group_size=500, **settings)
    for group, num_rows in enumerate([500, 400]):
        found = list(walk(file, chunk_of(file, group)))
        assert found[0].kind == DICTIONARY
        assert len(found) > 5
        for page_before, page_after in itertools.pairwise(found):
            assert page_before.end == page_after.offset
            assert page_before.end_row == page_after.first_row
        assert found[-1].end_row == num_rows


def test_a_walk_can_begin_at_any_page() -> None:
    file = write(numbered(500), use_dictionary=False, **SMALL_PAGES)
    chunk = chunk_of(file)
    found = list(walk(file, chunk))
    for place, first in enumerate(found):
        assert list(walk(file, chunk, first.offset, first.first_row)) == found[place:]


def test_a_walk_reads_headers_only() -> None:
    file = write(["x" * 100_000 + str(n) for n in range(100)], compression="none")
    found = list(walk(file, chunk_of(file)))
    assert sum(file.reads) < (1 << 16) + len(found) * (1 << 14) + 1


def test_a_header_longer_than_the_first_window_is_read() -> None:
    """Some writers put the page's least and greatest text into it, whole."""
    header = {1: 0, 2: 9, 3: 9, 5: {1: 1, 2: 0, 3: 3, 4: 3, 5: {1: b"m" * 300_000}}}
    file = file_of([(1, [page(header, plain(["abcde"]))])])
    assert texts_of(file) == ["abcde"]
    assert next(walk(file, chunk_of(file))).body_offset > 300_000


def test_pages_of_other_kinds_are_passed_over() -> None:
    index = page({1: 1, 2: 4, 3: 4, 6: {}}, b"abcd")
    unheard_of = page({1: 9, 2: 3, 3: 3, 12: {1: 5}}, b"xyz")
    first, second = data_page(1, plain(["a"])), data_page(2, plain(["b", "c"]))
    file = file_of([(3, [index, first, unheard_of, second])])
    assert texts_of(file) == ["a", "b", "c"]
    marks = [mark for _, mark in read(file)]
    assert texts_of(file, marks[0]) == ["b", "c"]


def test_an_empty_page_is_no_end() -> None:
    file = file_of([(2, [data_page(1, plain("a")), data_page(0, b""), data_page(1, plain("b"))])])
    assert texts_of(file) == ["a", "b"]


def test_the_chunk_ends_with_its_rows_whatever_follows() -> None:
    file = file_of([(1, [data_page(1, plain("a")), b"\xff" * 50]), (1, [data_page(1, plain("b"))])])
    assert texts_of(file) == ["a", "b"]


# --- runs -----------------------------------------------------------------------------------------


def test_runs_make_about_a_megabyte() -> None:
    texts = [f"{n:08}" * 1000 for n in range(1000)]  # 8 MB
    file = write(texts, data_page_size=100_000, write_batch_size=1, use_dictionary=False)
    sizes = [
        sum(found.unpacked_bytes for found in run)
        for run in PageReader(file, chunk_of(file)).runs(0)
    ]
    assert all(pages.RUN_BYTES <= size < pages.RUN_BYTES + 200_000 for size in sizes[:-1])
    assert len(sizes) == 7


def test_runs_begin_with_the_page_of_the_row() -> None:
    file = write(numbered(500), use_dictionary=False, **SMALL_PAGES)
    reader = PageReader(file, chunk_of(file))
    for row in range(500):
        first = next(reader.runs(row))[0]
        assert first.first_row <= row < first.end_row


def test_a_large_page_is_decoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LARGE_PAGE_BYTES", 2000)
    small, large = data_page(1, plain(["a"])), data_page(1, plain(["b" * 3000]))
    file = file_of([(6, [small, small, large, large, small, small])])
    runs = PageReader(file, chunk_of(file)).runs(0)
    assert [len(run) for run in runs] == [2, 1, 1, 2]


def test_a_dictionary_is_read_only_where_it_is_needed() -> None:
    """The last pages of a chunk are often plain: its dictionary had grown too large."""
    texts = [f"{n} of many different texts" for n in range(20_000)]
    file = write(texts, dictionary_pagesize_limit=100_000, compression="none", **SMALL_PAGES)
    marks = [mark for _, mark in read(file)]
    file.reads.clear()
    assert texts_of(file, marks[-3]) == texts[-2:]
    assert sum(file.reads) < (1 << 16) + (1 << 14) + 5000


def test_a_dictionary_is_read_once() -> None:
    texts = [f"{n % 500}" * 50 for n in range(200_000)]
    file = write(texts, compression="none", data_page_size=20_000, max_rows_per_page=5000)
    reader = PageReader(file, chunk_of(file))
    runs = [[page] for run in reader.runs(0) for page in run]
    assert len(runs) > 10
    file.reads.clear()
    assert sum(1 for run in runs for _ in reader.decode(run)) == len(texts)
    assert sum(file.reads) < file.size + 50_000


# --- files that no writer here writes -------------------------------------------------------------


@pytest.mark.parametrize("dictionary_offset", [None, I64(0)])
def test_a_dictionary_page_that_the_footer_does_not_name(dictionary_offset: I64 | None) -> None:
    indices = bytes([1, 4 << 1 | 0, 1, 2 << 1 | 0, 0])  # width 1; four times 1, twice 0
    parts = [dictionary_page(2, plain(["a", "b"])), data_page(6, indices, RLE_DICTIONARY)]
    file = file_of([(6, parts)], m11=dictionary_offset)
    assert texts_of(file) == [*"bbbbaa"]
    first_page = 4 + len(parts[0])
    assert texts_of(file, Mark(0, 3, first_page, 0)) == [*"baa"]


def test_optional_values_with_levels_in_runs() -> None:
    body = sized(levels([True, False, True])) + plain(["a", "c"])
    file = file_of([(3, [data_page(3, body)])], schema=[OPTIONAL_TEXT])
    assert texts_of(file) == ["a", None, "c"]


def test_version_2_pages_may_leave_a_compressed_column_as_it_is() -> None:
    pages = [page_left_as_it_is(2, 1, levels([True, False]), plain(["abc"]))]
    assert texts_of(file_of([(2, pages)], codec=GZIP, schema=[OPTIONAL_TEXT])) == ["abc", None]


def test_old_writers_count_the_chunk_too_short() -> None:
    """Before 2013: without the header of the dictionary page."""
    parts = [gzip_page(1, plain(["a"])), gzip_page(1, plain(["b"]))]
    file = file_of([(2, parts)], codec=GZIP, m7=I64(sum(map(len, parts)) - 20))
    assert texts_of(file) == ["a", "b"]


# --- damage ---------------------------------------------------------------------------------------


def damaged(file: MemoryFile, message: str) -> None:
    with pytest.raises(UserError, match=r"row group 0 of memory\.parquet is damaged.*" + message):
        read(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": -1}, "impossible size"),
        ({"unpacked": -5}, "impossible size"),
        ({"packed": 10_000}, "outside of its column"),
        ({"packed": 2**31 - 1}, "outside of its column"),
        ({"unpacked": 2**31 - 1}, "larger than its column"),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, int], message: str) -> None:
    file = file_of([(1, [data_page(1, plain(["a"]), **changes)])], m6=I64(1000))
    damaged(file, message)
    assert max(file.reads) <= file.size


def test_a_page_with_more_values_than_its_texts_can_be() -> None:
    damaged(file_of([(9, [data_page(9, plain(["a"]))])]), "")


def test_pages_with_fewer_rows_than_the_footer_says() -> None:
    damaged(file_of([(3, [data_page(1, plain("a")), data_page(1, plain("b"))])]), "")


def test_pages_with_more_rows_than_the_footer_says() -> None:
    damaged(file_of([(3, [data_page(1, plain("a")), data_page(9, plain("b"))])]), "more than its 3")


def test_a_dictionary_too_small_for_its_entries() -> None:
    """Decoders set memory aside by this number."""
    indices = bytes([1, 2 << 1, 0])
    parts = [dictionary_page(2**31 - 1, plain(["a"])), data_page(2, indices, RLE_DICTIONARY)]
    damaged(file_of([(2, parts)]), "too small for its dictionary")


def test_a_dictionary_that_is_not_there() -> None:
    file = file_of([(2, [data_page(2, bytes([1, 2 << 1, 0]), RLE_DICTIONARY)])])
    damaged(file, "dictionary page is missing")


def test_a_second_dictionary() -> None:
    one = dictionary_page(1, plain(["a"]))
    damaged(file_of([(1, [one, one, data_page(1, plain("a"))])]), "second dictionary")


def test_a_page_with_other_rows_than_values() -> None:
    header = {1: 3, 2: 5, 3: 5, 8: {1: 1, 2: 0, 3: 2, 4: 0, 5: 0, 6: 0}}
    damaged(file_of([(1, [page(header, plain("a"))])]), "other values than rows")


@pytest.mark.parametrize("change", [{"m9": I64(2)}, {"m7": I64(-9)}, {"m5": I64(3)}])
def test_places_that_cannot_be(change: dict[str, I64]) -> None:
    file = file_of([(1, [data_page(1, plain("a"))])], **change)
    damaged(file, "its footer")


def test_a_place_behind_the_file() -> None:
    damaged(file_of([(1, [data_page(1, plain("a"))])], m9=I64(10**12)), "0 rows are there of 1")


def test_a_text_with_a_wrong_checksum() -> None:
    file = write(["some text"] * 3, write_page_checksum=True, compression="none")
    place = file.content.index(b"some text")
    file.content = file.content.replace(b"some text", b"sOme text", 1)
    assert file.content[place : place + 9] == b"sOme text"
    damaged(file, "CRC")


def test_a_header_of_an_unknown_kind_is_left_to_pyarrow() -> None:
    body = plain(["a"])
    unreadable = page({1: 0, 2: len(body), 3: len(body), 5: {2: 0}}, body)  # without its count
    file = file_of([(2, [data_page(1, plain("z")), unreadable])])
    with pytest.raises(UnreadableHeader, match="page header at byte"):
        list(walk(file, chunk_of(file)))
    damaged(file, "")  # pyarrow cannot read it either


def test_reading_goes_on_where_only_pyarrow_knows_the_header() -> None:
    """A header with a field that is nested more deeply than any that there is today."""
    deep: dict[int, Any] = {1: 1}
    for _ in range(20):
        deep = {1: deep}
    header = {1: 0, 2: 5, 3: 5, 5: {1: 1, 2: 0, 3: 3, 4: 3}, 20: deep}
    texts = ["a" * pages.RUN_BYTES, "b", "c", "d"]
    first, last = data_page(2, plain(texts[:2])), data_page(1, plain("d"))
    file = file_of([(4, [first, page(header, plain("c")), last])])
    rows = read(file)
    assert [text for text, _ in rows] == texts
    assert [mark.offset for _, mark in rows] == [4, 4 + len(first), 0, 0]
    for place, (_, mark) in enumerate(rows):
        assert texts_of(file, mark) == texts[place + 1 :]


def test_a_mark_of_another_file_is_damage() -> None:
    file = write(numbered(50), **SMALL_PAGES)
    with pytest.raises(Damage, match="no page at byte"):
        list(walk(file, chunk_of(file), 10**9))
    with pytest.raises(UserError, match="is damaged"):
        read(file, Mark(0, 7, 10**9, 0))


# --- the virtual file -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("nullable", [True, False])
def test_each_page_can_be_decoded_by_itself(codec: Any, nullable: bool) -> None:
    texts = [None if nullable and n % 5 == 0 else text for n, text in enumerate(numbered(300))]
    schema = pa.schema([pa.field("text", pa.string(), nullable=nullable)])
    table = pa.table({"text": texts}, schema)
    for encoding in ({}, {"use_dictionary": False}, {"data_page_version": "2.0"}):
        file = write(table, compression=codec, **SMALL_PAGES, **encoding)
        reader = PageReader(file, chunk_of(file))
        for found in (found for run in reader.runs(0) for found in run):
            values = list(reader.decode([found]))
            wanted = [
                t if t is None else t.encode() for t in texts[found.first_row : found.end_row]
            ]
            assert values == wanted


def test_the_kinds_of_page_are_told_apart() -> None:
    file = write(["a", "b"], use_dictionary=False, compression="none")
    (found,) = walk(file, chunk_of(file))
    assert (found.kind, found.num_values, found.first_row) == (DATA, 2, 0)
    assert chunk_of(file).codec == NONE
