"""`diffurefill data ...` as a person calls it: exit codes, and what is on the screen."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffurefill.cli import COMMANDS, main
from diffurefill.commands.preview import token_texts
from diffurefill.config import DataConfig, Source
from diffurefill.data.inspection import inspect_source
from diffurefill.data.tokens.tokenizer import train_tokenizer

TEXTS = [f"Anna Lee saw the owl in {1900 + n}, over the hill.\n" * (n % 4 + 1) for n in range(60)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.parquet"
    pq.write_table(pa.table({"text": TEXTS, "number": list(range(60))}), path, row_group_size=20)
    return path


SMALL = ["--data.row-length", "64", "--data.tokenizer-pieces", "320", "--model.vocab-size", "400"]


# --- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_how_a_file_is_read_and_what_is_in_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_tokenizer(TEXTS, 320).to_json(), "utf-8")
    assert main(["data", "inspect", str(source), "--tokenizer", str(tokenizer)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("text.parquet", "60 rows in 3 row groups", "read page by page", "about 1"):
        assert words in shown
    assert "Anna Lee saw the owl in 1900" in shown
    assert "characters a token" in shown


def test_inspect_counts_the_tokens_that_training_sees(source: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 320)
    found = inspect_source(Source(paths=(str(source),)), 5, 3, tokenizer)
    assert found.sample_tokens == sum(len(tokenizer.document(text)) for text in TEXTS)
    assert found.sample_documents == 60
    assert list(found.documents) == TEXTS[:3]


def test_inspect_tells_what_is_wrong_and_goes_on(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.parquet").write_bytes(source.read_bytes()[:-20])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": "x"}))
    (tmp_path / "photo").write_bytes(b"\x89PNG\0\xff")
    assert main(["data", "inspect", str(tmp_path), str(tmp_path / "photo")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "broken.parquet is no Parquet file, or damaged" in shown
    assert "has no field 'text': set the source's text_column to one of body" in shown
    assert "photo is no UTF-8 text" in shown
    assert "document 2" in shown


def test_inspect_without_a_readable_document_fails(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "inspect", str(source), "--text-column", "body"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "no column 'body'; set text_column to one of: text" in shown
    assert "no document was found" in shown


def test_inspect_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(tmp_path / "gone")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--files", "0", "--files must be at least 1"),
        ("--files", "-1", "--files must be at least 1"),
        ("--documents", "-1", "--documents must not be negative"),
    ],
)
def test_inspect_refuses_numbers_that_leave_nothing_to_look_into(
    source: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    assert main(["data", "inspect", str(source), flag, value]) == 2
    assert message in capsys.readouterr().err
    assert main(["data", "inspect", str(source), "--documents", "0"]) == 0


# --- preview and pack ----------------------------------------------------------------------------


def test_preview_shows_masks_spans_and_parts(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.span-rows", "1.0", "--data.short-rows", "0.5", "--data.short-length", "16"]
    assert main(["data", "preview", "--data", str(source), "--rows", "4", *SMALL, *flags]) == 0
    shown = capsys.readouterr().out
    assert "row 3: " in shown
    assert "┃" in shown
    assert "⟨s⟩" in shown
    assert "spans" in shown


def test_preview_writes_a_page(source: Path, tmp_path: Path) -> None:
    page = tmp_path / "rows.html"
    flags = ["--data.span-rows", "1.0", "--rows", "2", "--html", str(page)]
    assert main(["data", "preview", "--data", str(source), *SMALL, *flags]) == 0
    text = page.read_text("utf-8")
    assert "text-decoration: underline" in text
    assert "row 1: " in text


def test_pack_says_how_fast_and_what_is_in_the_rows(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rows", "40", "--data.short-rows", "0.5", "--data.short-length", "16"]
    assert main(["data", "pack", "--data", str(source), *SMALL, *flags]) == 0
    shown = capsys.readouterr().out
    assert "40 rows, " in shown
    assert "tokens per CPU second" in shown
    for name in ("padding_share", "head_share", "short_share", "documents_cut_share"):
        assert name in shown


@pytest.mark.parametrize("command", ["preview", "pack"])
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--rows", "0", "--rows must be at least 1"),
        ("--rows", "-1", "--rows must be at least 1"),
        ("--step", "-1", "--step must not be negative"),
    ],
)
def test_numbers_out_of_range_are_named_by_their_flag(
    source: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    flag: str,
    value: str,
    message: str,
) -> None:
    assert main(["data", command, "--data", str(source), *SMALL, flag, value]) == 2
    assert message in capsys.readouterr().err


def test_a_token_is_shown_as_its_part_of_the_text() -> None:
    tokenizer = train_tokenizer(["the owl 東京 ran\n" * 20, "é"], 300)
    text = "the owl\nran 東京 to é and ü"
    ids = tokenizer.document(text)
    import numpy as np

    shown = list(token_texts(np.array(ids), tokenizer))
    assert len(shown) == len(ids)
    assert "".join(shown) == f"⟨s⟩{text}⟨/s⟩"


# --- the group -----------------------------------------------------------------------------------


def test_the_group_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS if name.startswith("data "))
    assert "worker" not in listed
    assert main(["data", "--help"]) == 0


def test_a_command_of_the_group_that_is_misspelt_is_answered_with_the_near_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data", "inspct", "x"]) == 2
    assert "did you mean `diffurefill data inspect`?" in capsys.readouterr().err


def test_the_default_configuration_is_the_python_library() -> None:
    assert DataConfig().sources[0].paths == ("python:",)
