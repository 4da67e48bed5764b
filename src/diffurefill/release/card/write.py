"""The card's files for an exported folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffurefill.fleet.exported import CURVE, README
from diffurefill.release.card.model import CardModel
from diffurefill.release.card.page import card, how_to_generate
from diffurefill.release.card.progress import curve
from diffurefill.release.card.sources import one_of, read_source

HERE = "."
"""A folder of this machine is nobody else's address."""


@dataclass(frozen=True)
class CardOptions:
    """What a card says that no file knows."""

    results: Sequence[Path] = ()
    name: str = "DiffuRefill model"
    repo: str = HERE
    """What a reader gives to `from_pretrained`."""
    license: str | None = None
    """Of the weights, as the hub writes licences (apache-2.0, mit ...)."""
    language: str | None = None


def card_files(model: CardModel, options: CardOptions) -> dict[str, bytes]:
    """{file name: bytes} of the card of `model`. Raises UserError for a result file that is
    missing, unknown, or of another model."""
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


def addressed_anew(content: bytes, before: CardModel, after: CardModel, repo: str) -> bytes:
    """The card `content` of `before` for its export `after` at `repo`. Only how to generate
    changes, and that not where a person wrote something else.
    """
    now = how_to_generate(after, repo).encode()
    for address in (HERE, repo):
        content = content.replace(how_to_generate(before, address).encode(), now)
    return content
