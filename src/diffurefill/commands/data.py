"""Commands on text: look into a source, see a batch, time the way from text to rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from diffurefill.commands.common import resolved, say
from diffurefill.config import RunConfig


@dataclass
class Inspect:
    """Look into a data source: files, row groups, pages, memory needed, documents, tokens."""

    paths: Positional[tuple[str, ...]]
    """Files, folders or globs: here, hf://datasets/user/name/..., s3://..., or an https:// file."""
    text_column: str = "text"
    """Name of the text field in Parquet, JSONL and Arrow."""
    tokenizer: str | None = None
    """Counts tokens too: a tokenizer.json, a SentencePiece model, a folder, or hf://user/repo."""
    files: int = 5
    """Files to look into; the rest are counted."""
    documents: int = 3
    """Documents to show."""

    def run(self) -> int:
        from rich.console import Console

        from diffurefill.commands.inspection import show_source
        from diffurefill.config import Source
        from diffurefill.data.inspection import inspect_source
        from diffurefill.data.tokens.tokenizer import load_tokenizer

        tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        source = Source(paths=tuple(self.paths), text_column=self.text_column)
        found = inspect_source(source, self.files, self.documents, tokenizer)
        Console().print(show_source(found))
        return 0 if found.documents or not self.documents else 1


@dataclass
class Preview:
    """Show one batch as training sees it: documents, masks and spans in colours."""

    preset: str = "demo"
    """The starting configuration; see also --config."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Paths of the only source: short for a [[data.sources]] section, whose text field is
    --data.sources.0.text-column."""
    rows: int = 4
    """How many rows."""
    slot: int = 0
    """The data slot whose rows are shown: worker 0 reads slot 0."""
    step: int = 0
    """Of this global step's mixture."""
    html: Path | None = None
    """Write a page instead, with the same colours."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        import io

        from rich.console import Console

        from diffurefill.commands.preview import show_rows
        from diffurefill.commands.rows import corrupted_rows
        from diffurefill.runtime import require_writable

        if self.html is not None:
            require_writable(self.html)
        rows, corrupted, tokenizer = corrupted_rows(
            resolved(self.settings, self.data, quietly=True), self.slot, self.step, self.rows
        )
        shown = show_rows(rows, corrupted, tokenizer)
        if self.html is None:
            Console().print(shown)
            return 0
        console = Console(record=True, width=120, file=io.StringIO())
        console.print(shown)
        self.html.write_text(console.export_html(), "utf-8")
        say(f"preview: {self.rows} rows in {self.html}")
        return 0


@dataclass
class Pack:
    """Time the way from text to rows, and say what the rows hold."""

    preset: str = "demo"
    """The starting configuration; see also --config."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Paths of the only source: short for a [[data.sources]] section, whose text field is
    --data.sources.0.text-column."""
    rows: int = 1000
    """How many rows to make."""
    slot: int = 0
    """The data slot whose rows are shown: worker 0 reads slot 0."""
    step: int = 0
    """Of this global step's mixture."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.commands.rows import packing_report

        config = resolved(self.settings, self.data, quietly=True)
        for line in packing_report(config, self.slot, self.step, self.rows):
            say(line)
        return 0
