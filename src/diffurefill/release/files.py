"""The files of an exported model, written into a folder: for transformers, for us, for people."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from diffurefill import config as configs
from diffurefill.config import DecodeConfig, RunConfig, Source, Stage, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.fleet import exported
from diffurefill.fleet.found import Found
from diffurefill.release.tokenizer_files import tokenizer_files
from diffurefill.train.checkpoint import schema
from diffurefill.train.tensorfile import Schema, StreamingWriter, TensorFile, chunks

MODELING = "modeling_diffurefill.py"
GENERATION_CONFIG = "generation_config.json"
MAX_NEW_TOKENS = 96

STAGE_CHOICES = {"order": {"confidence", "left_to_right"}, "quota": {"linear", "cosine"}}
"""What the exported file's decoder knows; a refill is always by confidence."""
STAGE_FIELDS = frozenset({"num_passes", "remask_fraction", "temperature", "min_p", "order_noise"})
STAGE_FIELDS |= {*STAGE_CHOICES, "tokens_per_pass", "commit_gap", "neighbour_ban"}


def write_files(found: Found, folder: Path) -> None:
    """Every file but the provenance. Raises UserError for weights that are not finite numbers, and
    for a model that transformers cannot be given."""
    config, tokenizer = found.config, found.tokenizer
    if config.model.causal:
        raise UserError(
            f"{found.name} is an autoregressive twin, not a denoiser: export it with --format pt"
        )
    stages = plain_stages(config.decode)
    files = {
        **tokenizer_files(tokenizer, config.data.row_length),
        exported.CONFIG: _json(model_config(config, tokenizer)),
        GENERATION_CONFIG: _json(generation_config(config, tokenizer, stages)),
        exported.RUN_CONFIG: configs.dumps(without_local_paths(config)).encode(),
        MODELING: (Path(__file__).parent / MODELING).read_bytes(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if found.probe is not None:
        shutil.copyfile(found.probe, folder / exported.PROBE)
    write_finite(found.weights, folder / exported.WEIGHTS)


def model_config(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json: what AutoConfig and AutoModelForMaskedLM read."""
    model = config.model
    return {
        "model_type": exported.MODEL_TYPE,
        "architectures": ["DiffuRefillForMaskedLM"],
        "auto_map": {
            "AutoConfig": "modeling_diffurefill.DiffuRefillConfig",
            "AutoModelForMaskedLM": "modeling_diffurefill.DiffuRefillForMaskedLM",
        },
        "dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_width,
        "rope_base": model.rope_base,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": config.data.row_length,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "mask_token_id": tokenizer.mask_id,
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": False,  # one tensor serves as both: there is nothing to tie
    }


def generation_config(
    config: RunConfig, tokenizer: Tokenizer, stages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """generation_config.json: how `generate` writes unless told otherwise."""
    emittable = tokenizer.emittable(config.model.vocab_size)
    return {
        "max_new_tokens": min(MAX_NEW_TOKENS, config.data.row_length // 2),
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "suppress_tokens": [i for i, may in enumerate(emittable.tolist()) if not may],
        "stages": list(stages),
    }


def plain_stages(decode: DecodeConfig) -> list[dict[str, Any]]:
    """The stages as the exported decoder takes them: what stands at its default is left out.

    Raises UserError for a decoder that the exported file does not know.
    """
    if replace(decode, stages=DecodeConfig().stages) != DecodeConfig():
        raise _unknown_decoder("more than stages")
    plain = []
    for stage in decode.stages:
        default = {f.name: f.default for f in fields(Stage)}
        given = {k: v for k, v in asdict(stage).items() if v != default[k]}
        for name, value in given.items():
            if name not in STAGE_FIELDS or value not in STAGE_CHOICES.get(name, {value}):
                raise _unknown_decoder(f"{name} = {value}")
        if stage.remask_fraction > 0 and stage.order != "confidence":
            raise _unknown_decoder(f"a refill by {stage.order}")
        plain.append(given)
    return plain


def _unknown_decoder(what: str) -> UserError:
    return UserError(
        f"the run's decoder has {what}, which an exported model's generate() cannot do: give it "
        "another with --decode (decode-card, decode-left-to-right ...)"
    )


def without_local_paths(config: RunConfig) -> RunConfig:
    """`config` naming local text by its file name alone: a model page is for everyone to read."""

    def bare(path: str) -> str:
        return path if "://" in path or path == "python:" else PurePosixPath(path).name

    def public(source: Source) -> Source:
        return replace(source, paths=tuple(bare(path) for path in source.paths))

    data = config.data
    data = replace(
        data,
        tokenizer=bare(data.tokenizer),
        collocations=data.collocations and bare(data.collocations),
        sources=tuple(public(source) for source in data.sources),
        probe_sources=tuple(public(source) for source in data.probe_sources),
    )
    return replace(config, data=data)


def write_finite(source: Path, dest: Path) -> None:
    """Copy weights piece by piece; UserError that names the first tensor with nan or inf."""
    found: Schema = schema(source)
    with (
        TensorFile(source) as weights,
        StreamingWriter(dest, found, {"format": "pt"}) as out,
    ):
        for name, start, stop in chunks(found):
            piece = weights.read(name, start, torch.empty(stop - start))
            if not piece.isfinite().all():
                raise UserError(
                    f"{name} holds nan or inf: these weights are damaged, or training had gone "
                    "astray; take earlier ones (`diffurefill rollback`, or --weights)"
                )
            out.write(name, piece, start)


def _json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()
