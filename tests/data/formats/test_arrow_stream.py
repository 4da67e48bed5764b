import contextlib
from pathlib import Path

import pyarrow as pa
import pytest

from diffurefill.config import UserError
from diffurefill.data.formats import arrow_stream
from diffurefill.data.formats.arrow_stream import read_rows, require_column
from diffurefill.data.formats.marks import Mark
from diffurefill.data.storage.files import LocalFile


def write(path: Path, column: pa.Array, *, batch_rows: int = 7, name: str = "text") -> Path:
    table = pa.table({"id": list(range(len(column))), name: column})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def rows_of(path: Path, start: Mark = Mark()) -> list[tuple[str | None, Mark]]:  # noqa: B008
    with contextlib.closing(LocalFile(path)) as file:
        return list(read_rows(file, "text", start))


def look(path: Path, column: str) -> None:
    with contextlib.closing(LocalFile(path)) as file:
        require_column(file, column)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_rows_come_in_order_and_resume_at_every_one(tmp_path: Path, kind: pa.DataType) -> None:
    texts = [None if n % 5 == 3 else f"t\u00e9xt {n}" for n in range(40)]
    file = write(tmp_path / "a.arrow", pa.array(texts, kind))
    rows = rows_of(file)
    assert [text for text, _ in rows] == texts
    for done, (_, mark) in enumerate(rows, start=1):
        assert rows_of(file, mark) == rows[done:]


def test_resuming_goes_to_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.arrow", pa.array(["x" * 10_000] * 600), batch_rows=20)
    *_, (_, mark) = rows_of(file)[:590]
    offsets: list[int] = []
    real = LocalFile.read_at

    def noted(self: LocalFile, offset: int, length: int) -> bytes:
        offsets.append(offset)
        return real(self, offset, length)

    monkeypatch.setattr(LocalFile, "read_at", noted)
    assert len(rows_of(file, mark)) == 10
    assert offsets[0] == 0  # the schema
    assert min(offsets[1:]) >= mark.offset > 5_000_000


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    raw = pa.array([b"a\xffb", b"c", None], pa.binary()).view(pa.string())
    file = write(tmp_path / "a.arrow", raw)
    assert [text for text, _ in rows_of(file)] == ["a\ufffdb", "c", None]


def test_a_missing_column_and_one_that_is_no_text_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.arrow", pa.array(["x"]), name="body")
    with pytest.raises(UserError, match=r"no column 'text'.*one of id, body"):
        look(file, "text")
    with pytest.raises(UserError, match=r"'id' of .* holds int64, not text"):
        look(file, "id")


@pytest.mark.parametrize("content", [b"", b"no arrow at all", b"\xff\xff\xff\xff\x10\0\0\0abc"])
def test_what_is_no_arrow_stream_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is no Arrow stream"):
        look(path, "text")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", pa.array(["text"] * 100))
    path = tmp_path / "a.arrow"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="damaged at byte"):
        rows_of(path)


def test_a_batch_too_large_to_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_stream, "MAX_BATCH_BYTES", 1_000)
    file = write(tmp_path / "a.arrow", pa.array(["x" * 1_000] * 10))
    with pytest.raises(UserError, match="writer_batch_size"):
        rows_of(file)
