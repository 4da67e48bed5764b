"""The card's files for an exported folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffurefill.release.card.model import read_model
from diffurefill.release.card.page import CURVE, card
from diffurefill.release.card.progress import curve
from diffurefill.release.card.sources import one_of, read_source

README = "README.md"


@dataclass(frozen=True)
class CardOptions:
    """What a card says that no file knows."""

    results: Sequence[Path] = ()
    name: str = "DiffuRefill model"
    repo: str = "."
    """What a reader gives to `from_pretrained`."""
    license: str | None = None
    """Of the weights, as the hub writes licences (apache-2.0, mit ...)."""
    language: str | None = None


def card_files(folder: Path, options: CardOptions) -> dict[str, bytes]:
    """{file name: bytes} of the card of the export in `folder`. Raises UserError for a result file
    that is missing, unknown, or of another model."""
    model = read_model(folder, options.name)
    sources = [read_source(path) for path in options.results]
    text = card(
        model,
        sources,
        repo=options.repo,
        license_name=options.license,
        language=options.language,
    )
    files = {README: text.encode()}
    progress = one_of(sources, "progress")
    if progress is not None:
        files[CURVE] = curve(progress.content).encode()
    return files
