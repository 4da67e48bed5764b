"""Where a card's figures come from: result files, told apart by what they hold.

| file                                  | kind        |
|---------------------------------------|-------------|
| `probe ... --json`                    | probes      |
| `probe STORE --follow --log`          | progress    |
| `evaluate ... --out`                  | benchmarks  |
| `pick ... --out`                      | pick        |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diffurefill.config import UserError
from diffurefill.store.base import sha256_file

Kind = Literal["probes", "progress", "benchmarks", "pick"]


@dataclass(frozen=True)
class Source:
    """A result file as it was read."""

    name: str
    kind: Kind
    content: Any
    """probes, progress: a list of records; the others: one record."""
    sha256: str

    @property
    def made_by(self) -> str:
        """Command and commit, where the file tells them."""
        if not isinstance(self.content, dict) or "command" not in self.content:
            return "-"
        commit = self.content.get("commit")
        return f"`{self.content['command']}`" + (f" at {commit[:12]}" if commit else "")


def read_source(path: Path) -> Source:
    """Raises UserError for a file that is not there or is none of these.

    The last line of a log may be torn, by a kill or because it is being written: it is left out.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    content = _parsed(text)
    kind = _kind_of(content)
    if kind is None:
        raise UserError(
            f"{path} is no result that a card shows: give files of `probe --json`, `probe "
            "--follow --log`, `evaluate --out` or `pick --out`"
        )
    if isinstance(content, dict) and kind in ("progress", "probes"):
        content = [content]  # a log of one line is JSON as well
    return Source(path.name, kind, content, sha256_file(path).sha256)


def one_of(sources: Sequence[Source], kind: Kind) -> Source | None:
    """The file of this kind; None without one. Raises UserError where there are two."""
    found = [source for source in sources if source.kind == kind]
    if len(found) > 1:
        names = " and ".join(source.name for source in found)
        raise UserError(f"{names} are both {kind}: give one, with all models in it")
    return found[0] if found else None


def _parsed(text: str) -> Any:
    """One JSON value, or those of JSON lines, a torn last one left out; None for neither."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    lines = [line for line in text.split("\n") if line.strip()]  # U+2028 ends no line of JSON
    if lines and not text.endswith("\n") and not _is_json(lines[-1]):
        del lines[-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _kind_of(content: Any) -> Kind | None:
    if isinstance(content, dict):
        if content.get("result") == "pick" and {"picked", "rule", "candidates"} <= content.keys():
            return "pick"
        models = content.get("models")
        if _are_records(models) and all("tasks" in model for model in models or ()):
            return "benchmarks"
        content = [content]
    if _are_records(content):
        if all("gen" in record and "weights" in record for record in content):
            return "progress"
        if all("sets" in record and "model" in record for record in content):
            return "probes"
    return None


def _are_records(content: Any) -> bool:
    is_list = isinstance(content, list) and bool(content)
    return is_list and all(isinstance(record, dict) for record in content)
