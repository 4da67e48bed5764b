import glob
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diffurefill.data.storage.layout import folder_files, in_order, pattern_files, split_pattern


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["b.txt", "a/z.md", "a/c.jsonl"], ["a/c.jsonl", "a/z.md", "b.txt"]),
        (["x.jsonl.gz", "x.json.zst", "x.NDJSON", "x.json", "x.csv"], "json.zst jsonl.gz NDJSON"),
        ([".git/a.txt", "a/.b/c.txt", "__pycache__/d.py", ".e.txt", "f.py"], ["f.py"]),
        (["README.md", "data/train-0.parquet", "data/test-0.parquet"], ["data/train-0.parquet"]),
        (["train-1.parquet", "train-0.parquet", "a.txt"], ["train-0.parquet", "train-1.parquet"]),
        (["en/train/0.parquet", "en/test/0.parquet", "z.md"], ["en/train/0.parquet", "z.md"]),
        (["en/train-0.parquet", "en/test-0.parquet", "de/data/train-0.parquet"], 2),
        (["train/sub/0.parquet", "test/0.parquet"], ["test/0.parquet", "train/sub/0.parquet"]),
        (["strain-0.parquet", "test-0.parquet"], ["strain-0.parquet", "test-0.parquet"]),
        (["data-0.arrow", "cache-1.arrow", "state.json", "b.Arrow"], ["b.Arrow", "data-0.arrow"]),
        (["train/data-0.arrow", "test/data-0.arrow", "dataset_dict.json"], ["train/data-0.arrow"]),
        (["a", "a/b.txt", "a.txt"], ["a/b.txt", "a.txt"]),
        ([], []),
    ],
)
def test_what_a_folder_stands_for(paths: list[str], chosen: list[str] | str | int) -> None:
    if isinstance(chosen, int):
        chosen = ["de/data/train-0.parquet", "en/train-0.parquet"]
    if isinstance(chosen, str):
        chosen = sorted(f"x.{ending}" for ending in chosen.split())
    assert folder_files(paths) == chosen


names = st.sampled_from(
    ["a", "b", "train-0.parquet", "c.txt", ".d.txt", "e.jsonl", "train", "data"]
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@given(st.lists(paths, unique=True), st.randoms(use_true_random=False))
def test_a_folder_s_files_do_not_depend_on_the_order_of_its_listing(
    listing: list[str], random: object
) -> None:
    shuffled = list(listing)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    chosen = folder_files(shuffled)
    assert chosen == folder_files(listing) == in_order(chosen)
    assert set(chosen) <= set(listing)


parts = st.sampled_from(["*", "**", "?", "a*", "[ab]", "b", "*.txt", ".*", "train*", "[!a]", "a"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    listing=st.lists(paths, max_size=8),
    pattern=st.lists(parts, min_size=1, max_size=3).map("/".join),
)
@example(listing=["a/a"], pattern="*/*/**")
@example(listing=["a/a/b", "a/b"], pattern="a/**")
def test_a_pattern_means_what_it_means_on_this_machine(
    listing: list[str], pattern: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("tree")
    for path in listing:
        file = root / path
        if not any(parent.is_file() for parent in file.parents) and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert pattern_files(files, pattern) == in_order(expected(root, pattern))


def expected(root: Path, pattern: str) -> set[str]:
    """By `glob`, and a walk below each folder among the matches."""
    found: set[str] = set()
    for match in glob.glob(pattern, root_dir=root, recursive=True):
        folder = root / match
        if folder.is_dir():
            inside = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
            found.update(os.path.normpath(f"{match}/{name}") for name in folder_files(inside))
        elif folder.exists():  # `glob` gives the folder of `folder/**` unseen
            found.add(match)
    return found


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("a/b/*/c.txt", ("a/b", "*/c.txt")),
        ("*.txt", ("", "*.txt")),
        ("a/x[1]", ("a", "x[1]")),
        ("/*/b", ("", "*/b")),
    ],
)
def test_a_pattern_s_fixed_part_ends_before_its_first_mark(
    path: str, split: tuple[str, str]
) -> None:
    assert split_pattern(path) == split
