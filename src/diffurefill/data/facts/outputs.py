"""The corpus file, which is whole or absent, and the manifest beside it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

from diffurefill import __version__
from diffurefill.config import UserError

LICENCE_NOTE = (
    "A restated text is a derivative of its source: the source's licence, share-alike clauses "
    "included, holds for it. Each record names it."
)


class CorpusFile:
    """Records of {"text", "source_id", "title", "licence", "style"}, counted as they come."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._licences: Counter[str] = Counter()
        self.records = 0
        self._words = 0

    def add(self, text: str, source_id: str, title: str, licence: str, style: str) -> None:
        fields = ("text", "source_id", "title", "licence", "style")
        record = dict(zip(fields, (text, source_id, title, licence, style), strict=True))
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.records += 1
        self._words += len(text.split())
        self._licences[licence] += 1

    def counts(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "words": self._words,
            "licences": dict(self._licences.most_common()),
        }


@contextlib.contextmanager
def corpus_file(out: Path) -> Generator[CorpusFile]:
    """`out` gets its records when the block ends without an error, all at once."""
    with _whole(out) as file:
        yield CorpusFile(file)


def manifest_path(out: Path) -> Path:
    """facts.jsonl -> facts.manifest.json"""
    return out.with_name(f"{out.name.removesuffix('.jsonl')}.manifest.json")


def write_manifest(out: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Puts `manifest` beside the corpus `out`, with its hash and ours; returns it."""
    whole = {"package_version": __version__, **manifest, "sha256": _sha256_of(out)}
    with _whole(manifest_path(out)) as file:
        file.write(json.dumps(whole, ensure_ascii=False, indent=1) + "\n")
    return whole


@contextlib.contextmanager
def _whole(path: Path) -> Generator[TextIO]:
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another --out") from None
    finally:
        part.unlink(missing_ok=True)


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
