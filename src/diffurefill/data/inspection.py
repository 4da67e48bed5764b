"""What `data inspect` finds in a source: files, how they will be read, some documents, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from diffurefill.config import Source, UserError
from diffurefill.data.documents import texts_of
from diffurefill.data.formats.parquet_facts import PageFacts, describe
from diffurefill.data.sources import SourceText, open_files, require_text
from diffurefill.data.storage.files import open_file
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.data.units import Unit

SAMPLE_DOCUMENTS = 200


@dataclass(frozen=True)
class FileFacts:
    name: str
    kind: str
    size: int
    """Bytes."""
    pages: PageFacts | None
    """Of a Parquet file."""
    error: str | None
    """Why the file cannot be read."""


@dataclass(frozen=True)
class SourceFacts:
    num_files: int
    size: int
    """Bytes of all files."""
    files: tuple[FileFacts, ...]
    """The first ones, looked into."""
    documents: tuple[str, ...]
    """The first ones."""
    sample_documents: int
    sample_chars: int
    sample_tokens: int | None
    """Of the sample; None without a tokenizer."""


def inspect_source(
    source: Source, num_files: int, num_documents: int, tokenizer: Tokenizer | None
) -> SourceFacts:
    """Reads the page headers of `num_files` files and the first documents of the source.

    A file that cannot be read is told, not raised. Raises UserError for a source without any file,
    and for numbers that leave nothing to look into.
    """
    if num_files < 1:
        raise UserError("--files must be at least 1")
    if num_documents < 0:
        raise UserError("--documents must not be negative")
    units = open_files(source)
    looked_into = tuple(_look_into(unit, source.text_column) for unit in units[:num_files])
    sound = [unit for unit, facts in zip(units, looked_into, strict=False) if facts.error is None]
    found = SourceText(source, tuple(sound))
    sample = list(islice(texts_of(found), max(SAMPLE_DOCUMENTS, num_documents)))
    return SourceFacts(
        num_files=len(units),
        size=sum(unit.file.size for unit in units),
        files=looked_into,
        documents=tuple(sample[:num_documents]),
        sample_documents=len(sample),
        sample_chars=sum(map(len, sample)),
        sample_tokens=None if tokenizer is None else _count(sample, tokenizer),
    )


def _look_into(unit: Unit, text_column: str) -> FileFacts:
    pages = error = None
    try:
        if unit.kind == "parquet":
            file = open_file(unit.file.uri)
            try:
                pages = describe(file, text_column)
            finally:
                file.close()
            if pages.way == "refused":
                error = "; ".join(pages.notes)
        else:
            require_text(unit)
            next(texts_of(SourceText(Source(text_column=text_column), (unit,))), None)
    except UserError as refused:
        error = str(refused)
    return FileFacts(unit.file.name, unit.kind, unit.file.size, pages, error)


def _count(texts: Sequence[str], tokenizer: Tokenizer) -> int:
    """Tokens of the documents, BOS and EOS included."""
    return sum(len(tokenizer.document(text)) for text in texts)
