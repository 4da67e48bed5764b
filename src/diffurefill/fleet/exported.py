"""A folder that `diffurefill export` or `import` wrote, here or on the hub, read without running
any of it: weights, tokenizer, configuration and probe. release/export.py writes the same files.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from diffurefill import config as configs
from diffurefill.config import RunConfig, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer

MODEL_TYPE = "diffurefill"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
RUN_CONFIG = "run.toml"
PROBE = "probe.safetensors"
PROVENANCE = "provenance.json"
READ = (CONFIG, WEIGHTS, TOKENIZER, RUN_CONFIG, PROBE, PROVENANCE)
"""The files that this package reads; the others are for transformers and for people."""
README = "README.md"
CURVE = "progress.svg"
CARD = (README, CURVE)
"""A person may write over these: no export counts them among its own."""
PICK = "pick.json"
NOT_MADE_AGAIN = (*CARD, PICK)
"""What another export of the same weights could not write from the files that are read."""


def is_exported(folder: Path) -> bool:
    try:
        return read_json_object(folder / CONFIG).get("model_type") == MODEL_TYPE
    except UserError:
        return False


def read_json_object(path: Path) -> dict[str, Any]:
    """UserError where the file is missing or holds something else."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} is not a JSON object")
    return record


def read_run_config(folder: Path) -> RunConfig:
    if not (folder / RUN_CONFIG).is_file():
        raise UserError(
            f"{folder} lacks {RUN_CONFIG}, which `export` writes beside the weights: fetch the "
            "whole folder"
        )
    return configs.load_file(folder / RUN_CONFIG, RunConfig())


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer as the model knows it: transformers wants MASK and PAD in the file, here they
    lie above it. UserError where they would not have the ids of config.json."""
    path, config = folder / TOKENIZER, read_json_object(folder / CONFIG)
    record = read_json_object(path)
    added = (config.get("mask_token_id"), config.get("pad_token_id"))
    tokenizer = Tokenizer.from_json(json.dumps(without_tokens(record, added)))
    if (tokenizer.mask_id, tokenizer.pad_id) != added:
        raise UserError(
            f"{path} is not the tokenizer this model was trained with: it puts MASK and PAD at "
            f"{tokenizer.mask_id} and {tokenizer.pad_id}, {CONFIG} at {added[0]} and {added[1]}"
        )
    return tokenizer


def without_tokens(record: dict[str, Any], ids: Collection[int | None]) -> dict[str, Any]:
    """The parsed tokenizer.json without the added tokens that have these ids."""
    kept = [token for token in record.get("added_tokens") or () if token["id"] not in ids]
    model = dict(record.get("model") or {})
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {piece: i for piece, i in model["vocab"].items() if i not in ids}
    return {**record, "added_tokens": kept, "model": model}
