"""A source as a person looks into it: a table of files, what reading takes, some documents."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from diffurefill.data.inspection import FileFacts, SourceFacts

SHOWN_CHARS = 600
WAYS = {
    "pages": "read page by page",
    "stream": "read page by page, the large ones unpacked as a stream",
    "passing over": "read from the start of a row group each time that reading goes on",
    "refused": "refused",
}


def show_source(found: SourceFacts) -> Group:
    parts: list[RenderableType] = [Text(f"{found.num_files:,} files, {size_text(found.size)}")]
    parts += [
        Text("\n".join([file.name, *map("  {}".format, _about(file))])) for file in found.files
    ]
    if found.num_files > len(found.files):
        parts.append(Text(f"and {found.num_files - len(found.files):,} more (--files)"))
    parts += [Text(line) for line in _lines(found)]
    for number, text in enumerate(found.documents):
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} …"
        title = f"document {number}: {len(text):,} characters"
        parts.append(Panel(Text(shown), title=title, title_align="left"))
    return Group(*parts)


def _about(file: FileFacts) -> list[str]:
    if file.pages is None:
        return [f"{size_text(file.size)}, {file.kind}", *([file.error] if file.error else [])]
    facts = file.pages
    return [
        f"{size_text(file.size)}, {', '.join(facts.codecs)}: {facts.num_rows:,} rows in "
        f"{facts.num_row_groups:,} row groups of up to {size_text(facts.largest_row_group_bytes)}",
        f"{facts.num_pages:,} pages in the first, of up to {size_text(facts.largest_page_bytes)}",
        f"{WAYS[facts.way]}; a reading process takes about {facts.peak_mb:,} MB",
        *facts.notes,
    ]


def _lines(found: SourceFacts) -> list[str]:
    if not found.sample_documents:
        return ["no document was found"]
    chars = found.sample_chars / found.sample_documents
    line = f"the first {found.sample_documents} documents: {chars:,.0f} characters each"
    if found.sample_tokens is None:
        return [f"{line} (give --tokenizer to count tokens)"]
    tokens = found.sample_tokens / found.sample_documents
    line += (
        f", {tokens:,.0f} tokens, {found.sample_chars / found.sample_tokens:.2f} characters a token"
    )
    rows = sum(file.pages.num_rows for file in found.files if file.pages)
    size = sum(file.size for file in found.files if file.pages)
    if rows and size:
        total = rows * tokens * found.size / size
        line += f"; about {total / 1e6:,.0f} M tokens in all files, if the rest is like these"
    return [line]


def size_text(num_bytes: int) -> str:
    """In the unit that leaves one to three digits before the point."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
