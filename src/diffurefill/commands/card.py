"""`diffurefill card`: the README.md of an exported model, from result files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from diffurefill.commands.common import say


@dataclass
class Card:
    """Write an exported model's card (README.md) from result files; it shows no other figures."""

    folder: Positional[Path]
    """A folder made by `export` or `import`."""
    results: tuple[Path, ...] = ()
    """Files of `probe --json`, `probe --follow --log`, `evaluate --out` and `pick --out`."""
    name: str = "DiffuRefill model"
    """The card's title."""
    repo: str = "."
    """Where readers find the model: user/repo."""
    license: str | None = None
    """Of the weights, as the hub writes licences: apache-2.0, mit ..."""
    language: str | None = None
    """Of the text it learned from: en, de ..."""

    def run(self) -> int:
        from diffurefill.release.card.model import read_model
        from diffurefill.release.card.write import CardOptions, card_files

        options = CardOptions(self.results, self.name, self.repo, self.license, self.language)
        for name, content in card_files(read_model(self.folder, self.name), options).items():
            (self.folder / name).write_bytes(content)
            say(f"wrote {self.folder / name}")
        return 0
