"""What a reader of Parquet files tells a person, for want of text, keys or an undamaged file."""

import base64
import io
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data.formats import parquet
from diffurefill.data.formats.marks import Mark
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

# --- what a person has to know --------------------------------------------------------------------


def test_a_missing_column_names_those_there_are() -> None:
    file = write(pa.table({"title": ["x"], "body": ["y"], "n": [1]}))
    message = (
        r"memory\.parquet has no column 'text'; set text_column to one of: title, body "
        r"\(columns: title, body, n\)"
    )
    for call in (parquet.count_row_groups, lambda f, c: read(f, Mark(), c)):
        with pytest.raises(UserError, match=message):
            call(file, "text")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (pa.array([1, 2]), "int64"),
        (pa.array([b"a", b"b"]), "binary"),
        (pa.array([{"a": "x", "b": 1}] * 2), "a text, b int64"),
        (pa.array([[["x"]]] * 2), "list/element/list/element text"),
        (pa.array([[{"role": "x", "n": 1}]] * 2), "role text, list/element/n int64"),
        (pa.array([[("a", "b")]] * 2, pa.map_(pa.string(), pa.string())), "key_value/key text"),
        (pa.array([[{"content": [{"t": "x"}]}]] * 2), "content/list/element/t text"),
    ],
)
def test_a_column_of_something_else_is_refused(values: pa.Array, what: str) -> None:
    file = write(pa.table({"text": values, "title": ["y", "z"]}))
    message = f"column 'text' of memory.parquet holds .*{what}.*, not text; .* one of: title"
    with pytest.raises(UserError, match=message):
        parquet.count_row_groups(file, "text")


def test_a_file_without_any_text_says_so() -> None:
    with pytest.raises(UserError, match="holds int64, not text; none is text"):
        parquet.count_row_groups(write([1]), "text")


class _Keys(pe.KmsClient):
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_an_encrypted_file_is_refused(tmp_path: Path, plaintext_footer: bool) -> None:
    """pyarrow itself ends the process when it is asked where such a column lies."""
    table = pa.table({"n": [1, 2], "text": ["a", "b"]})
    keys = pe.EncryptionConfiguration(
        "footer", column_keys={"column": ["text"]}, plaintext_footer=plaintext_footer
    )
    factory = pe.CryptoFactory(lambda _: _Keys())
    chosen = factory.file_encryption_properties(pe.KmsConnectionConfig(), keys)
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, table.schema, encryption_properties=chosen) as writer:
        writer.write_table(table)
    file = MemoryFile(path.read_bytes())
    with pytest.raises(UserError, match="is encrypted; decrypt the file or leave it out"):
        parquet.count_row_groups(file, "text")
    with pytest.raises(UserError, match="is encrypted; decrypt the file or leave it out"):
        read(file)


@pytest.mark.parametrize(
    "mark", [Mark(0, 11, 0, 0), Mark(0, 3, 0, 4), Mark(0, -1, 0, 0), Mark(0, 5, 4, -2)]
)
def test_a_mark_of_another_file_is_refused(mark: Mark) -> None:
    file = write(some_texts(10))
    with pytest.raises(UserError, match=r"row group 0 of .* has 10 rows.*not the file it was"):
        read(file, mark)


def test_a_row_group_that_is_not_there_is_refused() -> None:
    file = write(some_texts(10))
    for group in (-1, 1):
        with pytest.raises(
            UserError, match=rf"has no row group {group}: it is not the file it was"
        ):
            list(parquet.read_rows(file, "text", [group], Mark()))


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 but not really", b"x" * 100, b"PAR1PAR1"])
def test_a_file_that_is_no_parquet_is_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(
        UserError, match=r"memory\.parquet is no Parquet file, or damaged"
    ) as caught:
        parquet.count_row_groups(MemoryFile(content), "text")
    assert "\n" not in str(caught.value)


def test_a_footer_longer_than_the_file_is_not_believed() -> None:
    content = b"PAR1" + b"\0" * 20 + (2**31).to_bytes(4, "little") + b"PAR1"
    file = MemoryFile(content)
    with pytest.raises(UserError, match="a footer of 2147483648 bytes"):
        parquet.count_row_groups(file, "text")


def test_a_long_footer_is_read_whole() -> None:
    texts = some_texts(1500)
    file = write(texts, row_group_size=1)
    assert int.from_bytes(file.content[-8:-4], "little") > 1 << 16
    assert texts_of(file) == texts
    assert parquet.count_row_groups(file, "text") == 1500


def test_row_groups_and_file_must_agree_on_the_rows() -> None:
    pages = [data_page(1, plain(["a"]))]
    with pytest.raises(UserError, match="its row groups do not have the file's rows"):
        parquet.count_row_groups(file_of([(1, pages), (1, pages)], num_rows=3), "text")


def test_columns_in_another_file_are_refused() -> None:
    file = file_of([(1, [data_page(1, plain(["a"]))])])
    table = pq.ParquetFile(io.BytesIO(file.content)).metadata
    table.set_file_path("elsewhere.parquet")
    sink = io.BytesIO()
    table.write_metadata_file(sink)
    with pytest.raises(UserError, match="its columns are in another file"):
        parquet.count_row_groups(MemoryFile(sink.getvalue()), "text")


def test_a_file_cut_short_is_damaged() -> None:
    file = write(some_texts(500), **SMALL_PAGES)
    whole = file.content
    for end in range(0, len(whole), 101):
        with pytest.raises(UserError, match="is no Parquet file, or damaged"):
            parquet.count_row_groups(MemoryFile(whole[:end]), "text")


def test_a_part_missing_in_the_middle_is_damage() -> None:
    file = write(some_texts(500), **SMALL_PAGES, use_dictionary=False)
    file.content = file.content[:1000] + file.content[1500:]
    with pytest.raises(UserError, match=r"row group 0 of memory\.parquet is damaged"):
        read(file)


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_does_more_than_raise_an_error(seed: int) -> None:
    """Or change a text, where no checksum tells; rows do not get lost."""
    rng = random.Random(seed)
    texts = some_texts(300)
    files = []
    for _ in range(12):
        codec = rng.choice(["snappy", "zstd", "gzip", "lz4", "brotli", "none"])
        encoding = ENCODINGS[rng.choice(sorted(ENCODINGS))]
        version = rng.choice(["1.0", "2.0"])
        chosen = {"compression": codec, "data_page_version": version, **encoding}
        files.append(write(texts, row_group_size=200, **SMALL_PAGES, **chosen).content)
    outcomes = set()
    for _ in range(250):
        content = bytearray(rng.choice(files))
        footer = int.from_bytes(content[-8:-4], "little") + 8
        first = rng.choice([0, len(content) - footer])
        for _ in range(rng.choice([1, 1, 3])):
            content[rng.randrange(first, len(content))] ^= 1 << rng.randrange(8)
        try:
            file = MemoryFile(bytes(content))
            assert parquet.count_row_groups(file, "text") == 2
            found = texts_of(file)
            assert len(found) == len(texts)
            outcomes.add("same" if found == texts else "differs")
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
            outcomes.add("error")
    assert outcomes >= {"same", "error"}


@settings(max_examples=60)
@given(st.integers(0, 3), st.integers(0, 40), st.integers(0, 9000), st.integers(0, 40))
def test_no_mark_does_more_than_raise_an_error(
    group: int, row: int, offset: int, offset_row: int
) -> None:
    try:
        found = read(MARKED, Mark(group, row, offset, offset_row))
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert [text for text, _ in found] == [text for text, _ in MARKED_ROWS[group * 40 + row :]]


MARKED = write(some_texts(120), row_group_size=40, **SMALL_PAGES)
MARKED_ROWS = read(MARKED)


class _Broken(MemoryFile):
    def read_at(self, offset: int, length: int) -> bytes:
        if len(self.reads) > 2:
            raise UserError("the network is down")
        return super().read_at(offset, length)


def test_what_the_file_raises_is_not_taken_for_damage() -> None:
    flat, nested = write(some_texts(900), **SMALL_PAGES), write([["a"]] * 900)
    giant = write(["x" * 30_000_000], use_dictionary=False, compression="none")
    for file in (flat, nested, giant):
        with pytest.raises(UserError, match=r"^the network is down$"):
            read(_Broken(file.content))
