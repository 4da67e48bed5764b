from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.data.formats import pages, parquet, parquet_facts
from diffurefill.data.formats.parquet_facts import describe
from diffurefill.data.formats.thrift import I64
from tests.data.formats.handmade import data_page, file_of, page, plain, write

TEXTS = [f"{n} some text" * (n % 30) for n in range(2000)]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pages, parquet, parquet_facts):
        monkeypatch.setattr(module, "LARGE_PAGE_BYTES", 30_000)
    for module in (pages, parquet_facts):
        monkeypatch.setattr(module, "MAX_PAGE_BYTES", 200_000)


def test_a_plain_file_is_read_by_pages() -> None:
    file = write(TEXTS, row_group_size=1500, data_page_size=10_000, write_batch_size=50)
    facts = describe(file, "text")
    assert (facts.shape, facts.way, facts.codecs) == ("text", "pages", ("snappy",))
    assert (facts.num_rows, facts.num_row_groups) == (2000, 2)
    assert facts.largest_row_group_bytes > sum(map(len, set(TEXTS[:1500])))
    assert facts.dictionary_bytes == sum(len(text) + 4 for text in set(TEXTS[:1500]))
    assert 100 < facts.peak_mb < 120
    assert facts.notes == ()


def test_pages_are_counted_without_the_dictionary() -> None:
    chosen: dict[str, Any] = {"data_page_size": 10_000, "write_batch_size": 10}
    facts = describe(write(TEXTS, use_dictionary=False, **chosen), "text")
    size = sum(map(len, TEXTS)) + 4 * len(TEXTS)
    assert size / 12_000 < facts.num_pages < size / 10_000
    assert 10_000 < facts.largest_page_bytes < 13_000
    assert facts.dictionary_bytes == 0


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("codec", "page_bytes", "way"),
    [
        ("zstd", 10_000, "pages"),
        ("zstd", 1 << 30, "stream"),
        ("none", 1 << 30, "stream"),
        ("snappy", 100_000, "pages"),
        ("snappy", 1 << 30, "refused"),
    ],
)
def test_the_way_is_the_one_that_reading_takes(codec: Any, page_bytes: int, way: str) -> None:
    file = write(
        TEXTS,
        use_dictionary=False,
        compression=codec,
        data_page_size=page_bytes,
        write_batch_size=50,
        max_rows_per_page=1 << 30,
    )
    facts = describe(file, "text")
    assert facts.way == way
    assert (way == "refused") == any("too large to hold" in note for note in facts.notes)
    assert (way == "stream") == any("by unpacking a large page" in note for note in facts.notes)
    try:
        assert parquet.count_row_groups(file, "text") == 1
        assert len(list(parquet.read_rows(file, "text", None, parquet.Mark()))) == 2000
    except UserError:
        assert way == "refused"


@pytest.mark.usefixtures("small_limits")
def test_a_large_dictionary_is_refused() -> None:
    facts = describe(write(TEXTS, dictionary_pagesize_limit=1 << 30, compression="zstd"), "text")
    assert facts.way == "refused"
    assert facts.dictionary_bytes > 200_000


@pytest.mark.parametrize(
    ("rows", "shape", "note"),
    [
        ([["a", "b"]], "texts", "joined by newlines"),
        ([[{"role": "user", "content": "a"}]], "messages", "joined by blank lines"),
    ],
)
def test_nested_columns_are_passed_over(rows: list[Any], shape: str, note: str) -> None:
    facts = describe(write(rows), "text")
    assert (facts.shape, facts.way) == (shape, "passing over")
    assert any(note in line for line in facts.notes)
    assert any("passing over the rows before" in line for line in facts.notes)


def test_a_page_header_that_only_pyarrow_may_know() -> None:
    unreadable = page({1: 0, 2: 5, 3: 5, 5: {2: 0}}, plain("a"))
    facts = describe(file_of([(2, [data_page(1, plain("a")), unreadable])]), "text")
    assert (facts.way, facts.num_pages) == ("passing over", 1)


def test_damage_shows() -> None:
    with pytest.raises(UserError, match=r"row group 0 of memory\.parquet is damaged"):
        describe(file_of([(2, [data_page(1, plain("a"))])]), "text")
    with pytest.raises(UserError, match="is no Parquet file, or damaged"):
        describe(file_of([(1, [data_page(1, plain("a"))])], m9=I64(-1)), "text")


def test_an_empty_file_has_no_pages() -> None:
    facts = describe(file_of([(0, [])]), "text")
    assert (facts.num_rows, facts.num_pages, facts.way) == (0, 0, "pages")


def test_the_codecs_of_all_row_groups_are_named() -> None:
    one, two = write(["a"], compression="zstd"), write(["a"], compression="none")
    assert describe(one, "text").codecs == ("zstd",)
    assert describe(two, "text").codecs == ("none",)
    assert list(parquet_facts._notes("pages", "text", ("none", "zstd"))) == [
        "row groups differ in compression: none, zstd"
    ]
