"""Which files a folder or a pattern stands for: one rule, wherever the files lie.

Paths here are relative to the folder or to the fixed part of the pattern, with `/` between the
parts. Everything comes sorted part by part, so no order depends on a machine or a server.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import groupby

_DATA = re.compile(
    # `datasets` puts what it has computed, as cache-*.arrow, beside what it has saved.
    r"(?!cache-.*\.arrow$).*\.(parquet|arrow|jsonl|ndjson|(jsonl|ndjson|json)\.(gz|zst))",
    re.IGNORECASE,
)
_TEXT = (".txt", ".md", ".py", ".rst")
_TRAIN = (
    re.compile(r"data/train-[^/]*\.parquet"),  # as `datasets` uploads
    re.compile(r"train-[^/]*\.parquet"),
    re.compile(r"train/[^/]*\.parquet"),  # as the hub converts
    re.compile(r"train/data-[^/]*\.arrow"),  # as `datasets` saves splits to disk
)
_HIDDEN = (".", "__pycache__")


def is_text(path: str) -> bool:
    """Whether a folder's file of this name is plain text."""
    return path.lower().endswith(_TEXT)


def is_hidden(name: str) -> bool:
    return name.startswith(_HIDDEN)


def in_order(paths: Iterable[str]) -> list[str]:
    return sorted(paths, key=_parts)


def folder_files(paths: Iterable[str]) -> list[str]:
    """Which of the files below a folder are read: Parquet, Arrow, JSONL and text; of a data set in
    splits, as on the hub or as `datasets` saves it, at any depth, its train split alone."""
    return _readable(in_order(path for path in paths if not any(map(is_hidden, _parts(path)))))


def _readable(paths: list[str]) -> list[str]:
    for layout in _TRAIN:
        train = [path for path in paths if layout.fullmatch(path)]
        if train:
            return train
    chosen: list[str] = []
    for first, group in groupby(paths, key=lambda path: path.partition("/")[0]):
        # In a bucket one name may be a file and a folder at once.
        inside = [path.removeprefix(f"{first}/") for path in group if path != first]
        if first in paths and (_DATA.fullmatch(first) or is_text(first)):
            chosen.append(first)
        chosen += [f"{first}/{path}" for path in _readable(inside)] if inside else []
    return chosen


def has_magic(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def split_pattern(path: str) -> tuple[str, str]:
    """(fixed folder, pattern below it): `a/b/*/c.txt` is ("a/b", "*/c.txt")."""
    parts = path.split("/")
    fixed = next(place for place, part in enumerate(parts) if has_magic(part))
    return "/".join(parts[:fixed]), "/".join(parts[fixed:])


def pattern_files(paths: Iterable[str], pattern: str) -> list[str]:
    """The files that match as in a shell (`**` is any number of folders, and a leading dot must be
    written), and of each folder that matches what `folder_files` takes of it."""
    wanted = _parts(pattern)
    # The folders that a last `**` stands for may be none, but a file below them is some file.
    file_wanted = [*wanted, "*"] if wanted[-1] == "**" else wanted
    chosen: set[str] = set()
    folders: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        parts = _parts(path)
        if _matches(parts, file_wanted):
            chosen.add(path)
        for depth in range(len(parts)):
            if _matches(parts[:depth], wanted):
                folders["".join(f"{part}/" for part in parts[:depth])].append(path)
    for folder, inside in folders.items():
        below = folder_files(path.removeprefix(folder) for path in inside)
        chosen.update(f"{folder}{path}" for path in below)
    return in_order(chosen)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        if _matches(parts, pattern[1:]):
            return True
        return bool(parts) and parts[0][:1] != "." and _matches(parts[1:], pattern)
    if not parts or (parts[0][:1] == "." and pattern[0][:1] != "."):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _parts(path: str) -> list[str]:
    return path.split("/")
