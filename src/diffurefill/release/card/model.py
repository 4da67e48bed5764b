"""What an exported folder says of its model: sizes, training, data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffurefill.config import RunConfig, UserError
from diffurefill.fleet import exported
from diffurefill.model.denoiser import num_parameters
from diffurefill.train.flops import six_nd


@dataclass(frozen=True)
class CardModel:
    name: str
    config: RunConfig
    provenance: dict[str, Any]
    """`source` of provenance.json; empty for imported weights."""
    num_pieces: int

    @property
    def parameters(self) -> int:
        return num_parameters(self.config.model)

    @property
    def training_flops(self) -> float | None:
        """By the rule 6ND; None where the tokens are not known."""
        tokens = self.provenance.get("tokens")
        return None if tokens is None else six_nd(self.config.model) * tokens

    @property
    def exact_training_flops(self) -> float | None:
        """From the FLOPs a token that the workers logged; None where they did not."""
        per_token = self.provenance.get("flops_per_token")
        tokens = self.provenance.get("tokens")
        return None if per_token is None or tokens is None else per_token * tokens


def read_model(folder: Path, name: str) -> CardModel:
    """Raises UserError for a folder that `export` did not write."""
    if not exported.is_exported(folder) or not (folder / exported.RUN_CONFIG).exists():
        raise UserError(f"{folder} is no exported model: make one with `diffurefill export`")
    path = folder / exported.PROVENANCE
    provenance = exported.read_json_object(path).get("source", {}) if path.exists() else {}
    config, tokenizer = exported.read_run_config(folder), exported.read_tokenizer(folder)
    return CardModel(name, config, provenance, tokenizer.mask_id)
