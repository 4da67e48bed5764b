"""What an exported folder says of its model: sizes, training, data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffurefill.config import RunConfig, UserError
from diffurefill.fleet import exported
from diffurefill.fleet.found import Found, found_exported
from diffurefill.model.denoiser import num_parameters
from diffurefill.release.files import without_local_paths
from diffurefill.train.checkpoint import load_weights, weights_digest
from diffurefill.train.flops import six_nd


@dataclass(frozen=True)
class CardModel:
    name: str
    config: RunConfig
    provenance: dict[str, Any]
    """`source` of provenance.json; empty for imported weights."""
    num_pieces: int
    weights: Path
    """The safetensors file, read only where figures have to be told from those of other weights."""

    @property
    def parameters(self) -> int:
        return num_parameters(self.config.model)

    @property
    def weights_sha256(self) -> str:
        """As `evaluate` writes it beside its figures."""
        return weights_digest(load_weights(self.weights))[:12]

    @property
    def training_flops(self) -> float | None:
        """By the rule 6ND; None where the tokens are not known."""
        tokens = self.provenance.get("tokens")
        return None if tokens is None else six_nd(self.config.model) * tokens

    @property
    def exact_training_flops(self) -> float | None:
        """By the exact count (train/flops.py); None where nobody counted."""
        return self.provenance.get("flops")


def model_of(found: Found, name: str) -> CardModel:
    config = without_local_paths(found.config)
    return CardModel(name, config, found.provenance, found.tokenizer.mask_id, found.weights)


def read_model(folder: Path, name: str) -> CardModel:
    """Raises UserError for a folder that `export` did not write."""
    if not exported.is_exported(folder) or not (folder / exported.RUN_CONFIG).exists():
        raise UserError(f"{folder} is no exported model: make one with `diffurefill export`")
    return model_of(found_exported(folder, name), name)
