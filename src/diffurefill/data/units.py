"""A unit: a piece of a source that is read by itself, and shuffled and owned as one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diffurefill.config import UserError
from diffurefill.data.storage.listing import File

Kind = Literal["parquet", "arrow", "jsonl", "text", "python"]

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_PACKINGS = {".gz": "gzip", ".zst": "zstd"}
_OTHER_PACKINGS = (".xz", ".bz2", ".zip", ".tar", ".lz4", ".7z")


@dataclass(frozen=True)
class Unit:
    file: File
    kind: Kind
    row_group: int | None = None
    """The one row group that is this unit; None: the whole file."""

    @property
    def name(self) -> str:
        """What the unit is, on every machine."""
        group = "" if self.row_group is None else f"#{self.row_group}"
        return f"{self.file.name}{group}"

    @property
    def packing(self) -> str | None:
        """The compression of a JSONL file, as pyarrow calls it."""
        return _PACKINGS.get(Path(self.file.name).suffix.lower())


def kind_of(file: File) -> Kind:
    """Told by the name; raises UserError for a packing that cannot be read from any position."""
    name = Path(file.name)
    if name.suffix.lower() in _PACKINGS:
        name = name.with_suffix("")
    if name.suffix.lower() == ".parquet":
        return "parquet"
    if name.suffix.lower() == ".arrow":
        return "arrow"
    if name.suffix.lower() in _JSON_ENDINGS:
        return "jsonl"
    packed = name.suffix.lower() in _OTHER_PACKINGS or name.name != Path(file.name).name
    if packed:
        raise UserError(f"{file.uri} is compressed: unpack it first and name the unpacked file")
    return "text"
