"""Documents with an id, a title and a licence: what facts are taken from."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffurefill.config import UserError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_BATCH_ROWS = 256
_SENTENCE_END = re.compile(r"[.!?][\"')\]\u201d\u2019]*(?=\s)")
_IN_BRACKETS = re.compile(r"\s*\([^()]*\)\s*$")
_SUBJECT_FIELDS = ("subj", "subject", "title", "sub_label")


class Lead(NamedTuple):
    """`title` names the subject and may be empty."""

    id: str
    title: str
    text: str
    licence: str


@dataclass(frozen=True)
class LeadFiles:
    """The leads of JSONL and Parquet files, or of the folders that hold them; iterate repeatedly.

    A record has `text`, and may have `id` (else the SHA-256 of the text), `title` and `licence`
    (or `license`; else `licence` below). Records without text are passed over.
    """

    paths: tuple[Path, ...]
    licence: str = "unknown"
    limit: int | None = None
    """Read no more leads than so many."""

    def __iter__(self) -> Iterator[Lead]:
        left = self.limit
        for path in (file for given in self.paths for file in _files(given)):
            read = _parquet_records if path.suffix == ".parquet" else json_records
            for record in read(path):
                lead = _lead(record, self.licence, path)
                if lead is None:
                    continue
                if left is not None and left <= 0:
                    return
                left = None if left is None else left - 1
                yield lead


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        if not found:
            raise UserError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}")
        return found
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    return [path]


def _lead(record: Mapping[str, Any], licence: str, path: Path) -> Lead | None:
    text = record.get("text")
    if text is None and "text" in record:
        return None
    if not isinstance(text, str):
        raise UserError(
            f"{path}: a record has no text; it needs a field text, and may have id, title, licence"
        )
    if not text.strip():
        return None
    own = record.get("licence") or record.get("license") or licence
    lead_id = record.get("id")
    if lead_id in (None, ""):
        lead_id = hashlib.sha256(well_formed(text).encode()).hexdigest()
    named = (str(lead_id), str(record.get("title") or ""), text, str(own))
    return Lead(*map(well_formed, named))


def well_formed(text: str) -> str:
    """JSON may hold halves of surrogate pairs, which no UTF-8 file can."""
    return text.encode("utf-8", "replace").decode()


def json_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, packed with gzip or not; raises UserError naming the line."""
    with _lines(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            record = _parsed(line)
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}: not a JSON object; mend the line")
            yield record


@contextlib.contextmanager
def _lines(path: Path) -> Generator[Iterator[str]]:
    """The lines of a text file, packed with gzip or not; UserError where it cannot be read."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        # Some editors begin a file with a byte order mark, which is no part of its first line.
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            yield lines
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: it is not UTF-8; save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            wanted = {"id", "title", "text", "licence", "license"}
            columns = [name for name in file.schema_arrow.names if name in wanted]
            batches = file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)
            for batch in batches:
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def excerpt(text: str, max_words: int) -> str:
    """`text`, or its first whole sentences with at most `max_words` words."""
    words = list(re.finditer(r"\S+", text))
    if len(words) <= max_words:
        return text.strip()
    cut = text[: words[max_words].start()]
    ends = [match.end() for match in _SENTENCE_END.finditer(cut)]
    return (cut[: ends[-1]] if ends else cut).strip()


def subject_name(title: str) -> str:
    """What two names of one subject share: "Frozen (2013 film)" and "frozen"."""
    return _IN_BRACKETS.sub("", title).strip().casefold()


def read_subjects(path: Path) -> frozenset[str]:
    """The subject names of a list: JSONL with `subj`, `subject`, `title` or `sub_label` (PopQA's
    and T-REx's fields), or plain text with one name a line."""
    if not path.is_file():
        raise UserError(f"no such list of subjects: {path}")
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        with _lines(path) as lines:
            names = list(lines)
    else:
        names = [_named(record, path) for record in json_records(path)]
    subjects = frozenset(subject_name(name) for name in names) - {""}
    if not subjects:
        raise UserError(f"{path} names no subject")
    return subjects


def _named(record: Mapping[str, Any], path: Path) -> str:
    for field in _SUBJECT_FIELDS:
        if isinstance(record.get(field), str):
            return record[field]
    raise UserError(f"{path}: a record has none of the fields {', '.join(_SUBJECT_FIELDS)}")
