"""`data collocations`: the list of word sequences that span masking and phrase tokens use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from diffurefill.commands.common import progress, say
from diffurefill.config import Source

_REPORT_CHARS = 5_000_000


@dataclass(kw_only=True)
class Collocations:
    """List the word sequences of a text whose words occur together more than chance explains."""

    sources: Positional[tuple[str, ...]]
    """Files, folders, globs or addresses of text, as in data.sources."""
    out: Path
    """The list to write: one entry a line, the best first."""
    size: int | None = None
    """Entries: half of two words, a quarter of three, an eighth each of four and of five."""
    coverage: float | None = None
    """Instead of a size: the share of words that is to lie in an entry, such as 0.25."""
    min_count: int = 10
    """Only sequences that occur more often are listed."""
    squared: bool = False
    """Rank by log p(w)^2, which prefers frequent sequences, instead of log p(w)."""
    text_column: str = "text"
    """Name of the text field in Parquet and JSONL."""

    def run(self) -> int:
        from diffurefill.data.documents import texts_of
        from diffurefill.data.sources import open_source
        from diffurefill.data.spans.collocations import build_collocations
        from diffurefill.runtime import require_writable

        require_writable(self.out)
        source = Source(paths=self.sources, text_column=self.text_column)
        made = build_collocations(
            _shown(texts_of(open_source(source, num_slots=1))),
            size=self.size,
            coverage=self.coverage,
            min_count=self.min_count,
            squared=self.squared,
            report=say,
        )
        made.save(self.out)
        if made.facts["lost"]:
            say(
                "the text has more different sequences than are kept in memory: some that occur up "
                f"to {self.min_count + made.facts['lost']} times may be missing"
            )
        say(
            f"{self.out}: {len(made.entries):,} entries that hold {made.facts['coverage']:.1%} of "
            f"{made.facts['num_words']:,} words"
        )
        return 0


def _shown(texts: Iterable[str]) -> Iterator[str]:
    num_chars = shown = 0
    for text in texts:
        num_chars += len(text)
        if num_chars - shown >= _REPORT_CHARS:
            shown = num_chars
            progress(f"read {num_chars / 1e6:,.0f} million characters")
        yield text
    progress("")
