import errno
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data.storage.files import (
    File,
    LocalFile,
    Stream,
    list_files,
    looks_like_text,
    open_file,
    pinned,
)


def write(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def names(path: Path | str) -> list[str]:
    return [file.name for file in list_files(str(path))]


# --- listing -------------------------------------------------------------------------------------


def test_a_file_is_itself_whatever_its_ending(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", b"\0\xff\0")
    assert list_files(str(path)) == [File(str(path), "a.bin", 3)]


def test_a_folder_s_files_come_in_order_with_names_below_it_and_sizes(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "four")
    write(tmp_path / "a" / "z.md", "z")
    write(tmp_path / "a" / "c.jsonl.zst", b"\x28\xb5")
    write(tmp_path / "image.png")
    files = list_files(str(tmp_path))
    assert [(file.name, file.size) for file in files] == [
        ("a/c.jsonl.zst", 2),
        ("a/z.md", 1),
        ("b.txt", 4),
    ]
    assert [Path(file.uri) for file in files] == [tmp_path / file.name for file in files]


def test_hidden_files_and_text_files_that_are_none_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    for hidden in (".git/x.txt", "__pycache__/y.py", ".z.md"):
        write(tmp_path / hidden)
    write(tmp_path / "binary.txt", b"\0\xff")
    assert names(tmp_path) == ["a.txt"]


def test_links_to_files_are_followed_and_links_to_folders_are_not(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "a.txt", "12345").parent
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "b.txt").symlink_to(outside / "a.txt")
    (folder / "again").symlink_to(folder)
    (folder / "out").symlink_to(outside)
    assert [(file.name, file.size) for file in list_files(str(folder))] == [("b.txt", 5)]
    (tmp_path / "link").symlink_to(outside)
    assert names(tmp_path / "link") == ["a.txt"]


def test_a_hub_layout_gives_its_train_files_alone(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write(root / "README.md")
    for name in ("train-1", "train-0", "validation-0", "test-0"):
        write(root / "data" / f"{name}.parquet")
    train = ["train-0.parquet", "train-1.parquet"]
    assert names(root / "data") == train
    assert names(root) == [f"data/{name}" for name in train]
    assert names(tmp_path) == [f"set/data/{name}" for name in train]


def test_a_glob_gives_its_matches_and_what_is_in_the_folders_among_them(tmp_path: Path) -> None:
    for path in ("x/b.txt", "x/a.txt", "y/train-0.parquet", "y/test-0.parquet", "x/n/c.txt"):
        write(tmp_path / path)
    assert names(tmp_path / "x" / "*.txt") == ["a.txt", "b.txt"]
    assert names(tmp_path / "*") == ["x/a.txt", "x/b.txt", "x/n/c.txt", "y/train-0.parquet"]
    assert names(tmp_path / "**" / "[bc].txt") == ["x/b.txt", "x/n/c.txt"]
    # A file that is matched, and lies in two folders that are matched, is still one file.
    assert names(tmp_path / "x" / "**") == ["a.txt", "b.txt", "n/c.txt"]


def test_a_relative_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt")
    write(tmp_path / "x" / "b.txt")
    monkeypatch.chdir(tmp_path)
    assert list_files("*.txt") == [File("a.txt", "a.txt", 4)]
    assert list_files("./*/*.txt") == [File("./x/b.txt", "x/b.txt", 4)]


def test_a_name_with_brackets_that_exists_is_no_glob(tmp_path: Path) -> None:
    assert names(write(tmp_path / "a[1].txt")) == ["a[1].txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.txt", "no such file or folder"),
        ("*.txt", "no file matches"),
        ("nothing/**", "no file matches"),
    ],
)
def test_a_source_that_is_not_there_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"{message}.*{tmp_path.name}"):
        list_files(str(tmp_path / name))


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no such file or folder: .*gone\.parquet"):
        list_files(str(tmp_path))


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)  # root, whom the tests may run as, may read all
    with pytest.raises(UserError, match=rf"cannot read {tmp_path}: Permission denied"):
        list_files(str(tmp_path))


def test_a_hidden_folder_is_not_even_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.txt")
    write(tmp_path / ".git" / "b.txt")
    scandir, seen = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(str(path)) or scandir(path))
    assert names(tmp_path) == ["a.txt"]
    assert seen == [str(tmp_path)]


def test_a_folder_without_a_readable_file_is_empty(tmp_path: Path) -> None:
    write(tmp_path / "image.png")
    assert list_files(str(tmp_path)) == []


@pytest.mark.parametrize(
    "address", ["ftp://host/a.txt", "hf://models/a/b", "hf://datasets/justone", "https://host/"]
)
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"hf://datasets/owner/name|names no file"):
        list_files(address)


@pytest.mark.parametrize("path", ["data", "/a/*.txt", "s3://bucket/x", "https://host/a", "python:"])
def test_only_a_data_set_of_the_hub_is_pinned(path: str) -> None:
    assert pinned(path) == path


# --- reading -------------------------------------------------------------------------------------


@given(st.binary(max_size=50), st.integers(0, 60), st.integers(0, 60))
def test_a_range_is_cut_at_the_file_s_end(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, offset: int, length: int
) -> None:
    file = open_file(str(write(tmp_path_factory.mktemp("range") / "a", content)))
    assert file.size == len(content)
    assert file.read_at(offset, length) == content[offset : offset + length]
    file.close()


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file or folder: .*gone\.txt"):
        open_file(str(tmp_path / "gone.txt"))
    with pytest.raises(UserError, match=rf"cannot read {tmp_path}: Is a directory"):
        open_file(str(tmp_path))


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "0123456789")
    file = LocalFile(path)
    os.truncate(path, 4)
    assert file.read_at(0, 4) == b"0123"
    with pytest.raises(UserError, match=r"a\.txt became shorter while it was read"):
        file.read_at(2, 6)
    file.close()


def test_a_stream_reads_and_seeks_as_a_file_does(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    file = LocalFile(write(tmp_path / "a", content))
    stream, plain = io.BufferedReader(Stream(file, 10), 64), io.BytesIO(content)
    plain.seek(10)
    for move, whence in ((0, 1), (5, 0), (-7, 2), (3, 1), (1000, 0), (5000, 0)):
        assert stream.seek(move, whence) == plain.seek(move, whence)
        assert stream.read(100) == plain.read(100)
        assert stream.tell() == plain.tell()
    file.close()


@pytest.mark.parametrize(
    ("content", "is_text"),
    [
        (b"x" * 65_535 + "\u00e9".encode(), True),  # the sniffed bytes end within a character
        (b"", True),
        (b"a\0b", False),
        (b"\xff\xfe", False),
    ],
)
def test_text_is_told_by_its_first_bytes(tmp_path: Path, content: bytes, is_text: bool) -> None:
    file = LocalFile(write(tmp_path / "a", content))
    assert looks_like_text(file) is is_text
    file.close()
