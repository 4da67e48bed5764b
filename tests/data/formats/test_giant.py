import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data.formats import giant, pages, parquet
from diffurefill.data.formats.footer import Damage, read_footer
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.pages import DICTIONARY, walk
from tests.data.formats.handmade import (
    GZIP,
    OPTIONAL_TEXT,
    MemoryFile,
    data_page,
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

ONE_PAGE: dict[str, Any] = {
    "use_dictionary": False,
    "data_page_size": 1 << 30,
    "max_rows_per_page": 1 << 30,
}


@pytest.fixture(autouse=True)
def _every_page_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pages, parquet):
        monkeypatch.setattr(module, "LARGE_PAGE_BYTES", 0)


def streamed(file: MemoryFile) -> list[bytes | None]:
    """The values of all pages of the first row group, none of which pyarrow has decoded."""
    chunk = read_footer(file).chunk(0, 0)
    found = [page for page in walk(file, chunk) if page.kind != DICTIONARY]
    assert all(giant.can_stream(chunk, page) for page in found)
    return [value for page in found for value in giant.read_values(file, chunk, page)]


def texts(count: int) -> list[str | None]:
    return [None if n % 7 == 0 else f"é {n} " * (n % 13) for n in range(count)]


@pytest.mark.parametrize("codec", ["zstd", "gzip", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_stream_gives_what_pyarrow_decodes(
    codec: Any, version: Any, nullable: bool, has_checksum: bool
) -> None:
    values = [text if nullable else text or "" for text in texts(3000)]
    schema = pa.schema([pa.field("text", pa.string(), nullable=nullable)])
    table = pa.table({"text": values}, schema)
    chosen = {"compression": codec, "data_page_version": version}
    file = write(table, **ONE_PAGE, **chosen, write_page_checksum=has_checksum)
    assert streamed(file) == [None if text is None else text.encode() for text in values]
    assert texts_of(file) == values


@settings(max_examples=40)
@given(st.lists(st.none() | st.text(max_size=30), min_size=1, max_size=60), st.integers(1, 300))
def test_texts_may_lie_across_blocks(values: list[str | None], block_bytes: int) -> None:
    file = write(pa.array(values, pa.string()), **ONE_PAGE, compression="zstd")
    before = giant._BLOCK_BYTES
    giant._BLOCK_BYTES = block_bytes
    try:
        assert streamed(file) == [None if text is None else text.encode() for text in values]
    finally:
        giant._BLOCK_BYTES = before


def test_reading_goes_on_inside_a_giant_page() -> None:
    values = texts(1000)
    file = write(values, **ONE_PAGE, compression="zstd")
    rows = read(file)
    assert {mark.offset for _, mark in rows[:-1]} == {4}
    for place in (0, 1, 255, 256, 257, 998):
        assert read(file, rows[place][1]) == rows[place + 1 :]


def test_levels_of_every_form() -> None:
    """Bits and runs, and more of them than there are values."""
    forms = [
        bytes([2 << 1 | 1, 0b10100101, 0b1]),
        bytes([3 << 1, 1]),
        bytes([200 << 1 & 127 | 128, 3, 0]),
    ]
    expected = [1, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0]
    body = sized(b"".join(forms)) + plain(["x"] * sum(expected))
    file = file_of([(21, [data_page(21, body)])], schema=[OPTIONAL_TEXT])
    assert [value is not None for value in streamed(file)] == [bool(e) for e in expected]
    assert streamed(file) == [t if t is None else t.encode() for t in texts_of(file)]


def test_a_page_left_as_it_is_in_a_compressed_column() -> None:
    pages = [page_left_as_it_is(2, 1, levels([True, False]), plain(["abc"]))]
    file = file_of([(2, pages)], codec=GZIP, schema=[OPTIONAL_TEXT])
    assert streamed(file) == [b"abc", None]


def test_levels_in_the_oldest_encoding_are_left_to_pyarrow() -> None:
    body = bytes([0b10100101]) + plain("abcd")
    file = file_of([(8, [data_page(8, body, levels=4)])], schema=[OPTIONAL_TEXT])
    assert texts_of(file) == ["a", None, "b", None, None, "c", None, "d"]


def test_invalid_text_is_replaced() -> None:
    file = file_of([(2, [data_page(2, plain([b"a\xffb", "c"]))])])
    assert texts_of(file) == ["a\ufffdb", "c"]


# --- what cannot be streamed ----------------------------------------------------------------------


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pages, giant):
        monkeypatch.setattr(module, "MAX_PAGE_BYTES", 600_000)


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize(
    ("chosen", "what"),
    [
        ({"compression": "snappy"}, "a page of 1 MB"),
        ({"compression": "lz4"}, "a page of 1 MB"),
        ({"compression": "brotli"}, "a page of 1 MB"),
        ({"column_encoding": {"text": "DELTA_BYTE_ARRAY"}}, "a page of 1 MB"),
        (
            {"use_dictionary": True, "dictionary_pagesize_limit": 1 << 30},
            "a dictionary page of 1 MB",
        ),
    ],
)
def test_a_page_that_must_be_whole_is_refused(chosen: dict[str, Any], what: str) -> None:
    values = [f"{n:04} " * 200 for n in range(1000)]
    file = write(values, **(ONE_PAGE | {"compression": "zstd"} | chosen))
    message = f"row group 0 of memory.parquet cannot be read in bounded memory: it has {what}"
    with pytest.raises(UserError, match=message + r".*write_table.*data_page_size.*leave it out"):
        read(file)


@pytest.mark.usefixtures("small_budget")
def test_the_first_pages_of_nested_columns_are_looked_at() -> None:
    file = write([["x" * 900_000]], **ONE_PAGE, compression="zstd")
    with pytest.raises(UserError, match="it has a page of 1 MB"):
        read(file)


@pytest.mark.usefixtures("small_budget")
def test_one_text_of_more_than_the_budget_is_refused() -> None:
    file = write(["short", "x" * 2_000_000], **ONE_PAGE, compression="zstd")
    rows = parquet.read_rows(file, "text", None, Mark())
    with pytest.raises(UserError, match="it has a text of 2 MB"):
        list(rows)


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_values", "body", "message"),
    [
        (3, plain(["a", "b"]), "goes on behind the end"),
        (1, plain(["a", "b"]), "another size"),
        (1, b"\x09\0\0\0abc", "goes on behind the end"),
        (1, b"\xff\xff\xff\xffabc", "goes on behind the end"),
        (1, b"\x03\0", "goes on behind the end"),
    ],
)
@pytest.mark.parametrize("make", [data_page, gzip_page])
def test_texts_that_do_not_fit_their_page(
    num_values: int, body: bytes, message: str, make: Any
) -> None:
    codec = GZIP if make is gzip_page else 0
    file = file_of([(num_values, [make(num_values, body)])], codec=codec)
    with pytest.raises(UserError, match=rf"row group 0 of memory\.parquet is damaged.*{message}"):
        read(file)


@pytest.mark.parametrize("unpacked", [8, 12])
def test_a_page_that_unpacks_to_another_size(unpacked: int) -> None:
    body = gzip_page(2, plain(["a", "b"]))
    wrong = body.replace(b"\x15\x14", bytes([0x15, unpacked * 2]), 1)
    assert body != wrong
    with pytest.raises(UserError, match="is damaged"):
        read(file_of([(2, [wrong])], codec=GZIP))


def test_a_page_that_unpacks_to_more_than_its_texts() -> None:
    file = file_of([(1, [gzip_page(1, plain(["a", "b"]), unpacked=5)])], codec=GZIP)
    with pytest.raises(UserError, match="another size than its header says"):
        read(file)


def test_fewer_levels_than_values() -> None:
    body = sized(levels([True, False])) + plain(["a"])
    file = file_of([(3, [data_page(3, body)])], schema=[OPTIONAL_TEXT])
    with pytest.raises(UserError, match="another number of texts than their headers say"):
        read(file)


def test_levels_that_end_too_early() -> None:
    body = sized(b"\x02") + plain(["a"])
    file = file_of([(1, [data_page(1, body)])], schema=[OPTIONAL_TEXT])
    with pytest.raises(UserError, match="definition levels end too early"):
        read(file)


def test_a_wrong_checksum_is_noticed_at_the_page_s_end() -> None:
    body = plain(["a", "b"])
    header = {1: 0, 2: len(body), 3: len(body), 5: {1: 2, 2: 0, 3: 3, 4: 3}}

    def file(crc: int) -> MemoryFile:
        signed = crc - (1 << 32) if crc >> 31 else crc
        return file_of([(2, [page(header | {4: signed}, body)])])

    right = zlib.crc32(body)
    assert texts_of(file(right)) == ["a", "b"]
    with pytest.raises(UserError, match="does not have its checksum"):
        read(file(right ^ 1 << 31))


@pytest.mark.parametrize("codec", ["zstd", "gzip", "none"])
def test_no_flipped_byte_does_more_than_raise_an_error(codec: Any) -> None:
    values = [f"{n} some text" for n in range(100)]
    file = write(values, **ONE_PAGE, compression=codec)
    whole, end = file.content, file.content.rindex(b"schema") - 100
    for place in range(4, min(end, 700), 3):
        file.content = whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
        try:
            assert len(read(file)) == len(values)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_damage_ends_a_stream() -> None:
    file = write(["x" * 1000] * 10, **ONE_PAGE, compression="zstd")
    chunk = read_footer(file).chunk(0, 0)
    (found,) = walk(file, chunk)
    cut = found._replace(body_bytes=found.body_bytes - 5)
    with pytest.raises(Damage):
        list(giant.read_values(file, chunk, cut))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's VmHWM")
def test_memory_does_not_grow_with_a_page(tmp_path: Path) -> None:
    """A page of 100 MB; read whole, it takes that and more."""
    path = tmp_path / "giant.parquet"
    text = " ".join(str(n * n) for n in range(5000))
    values = [f"{n} {text[n:]}" for n in range(2400)]
    pq.write_table(pa.table({"text": values}), path, compression="zstd", **ONE_PAGE)
    code = """
import sys
from pathlib import Path
from diffurefill.data.formats import parquet
from diffurefill.data.storage.files import LocalFile
from diffurefill.data.formats.marks import Mark
def peak_kb():  # ru_maxrss would count the parent's memory too
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak_kb()
size = sum(len(text) for text, _ in parquet.read_rows(LocalFile(sys.argv[1]), "text", None, Mark()))
print(size, peak_kb() - before)
"""
    command = [sys.executable, "-c", code, str(path)]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    size, grown_kb = map(int, output.split())
    assert size == sum(map(len, values)) > 90_000_000
    assert grown_kb < 40_000
