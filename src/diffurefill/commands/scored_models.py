"""Models that can be scored, by the words that name them on a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from diffurefill.config import UserError, load_preset
from diffurefill.decode.generate import generate
from diffurefill.evaluate.harness.lm import DiffusionLM, Fill
from diffurefill.evaluate.likelihood.scorer import Scorer, ScoringModel
from diffurefill.fleet.loading import LoadedModel, left_to_right, load
from diffurefill.runtime import default_device, measuring_dtype, philox, without_folders
from diffurefill.train.checkpoint import weights_digest

Precision = Literal["auto", "float32", "bfloat16"]
HF, RANDOM = "hf:", "random:"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a model is read: what the commands and the harness's model arguments share."""

    weights: str | None = None
    dtype: Precision = "auto"
    device: torch.device | None = None
    max_length: int | None = None
    """Tokens of a row; the length that the model was trained with by default."""
    batch_tokens: int | None = None
    batch_rows: int = 16
    """Of the harness's own backend."""
    decode: str = "decode-left-to-right"
    seed: int = 0
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Precision):
            raise UserError(f"no dtype {self.dtype}: choose {', '.join(get_args(Precision))}")
        for name in ("max_length", "batch_tokens", "batch_rows"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise UserError(f"{name} {value}: give a whole number above 0")
        if not isinstance(self.seed, int):
            raise UserError(f"seed {self.seed}: give a whole number")
        if not isinstance(self.decode, str) or not isinstance(self.weights, str | None):
            raise UserError(f"decode {self.decode}, weights {self.weights}: give their names")


def open_lm(name: str, scorer: Scorer, how: Reading) -> tuple[Any, dict[str, Any]]:
    """The harness's model for `name`, and what a result file says of it.

    `hf:PATH_OR_ID` is an autoregressive model in the harness's own backend (a .gguf file too),
    `random:MODEL` that model with untrained weights; anything else is a model of ours.
    """
    if name.startswith(HF):
        return _open_hf(name.removeprefix(HF), how)
    model = load(name.removeprefix(RANDOM), how.weights)
    if name.startswith(RANDOM):
        seed = int(philox(how.seed, "untrained").integers(2**31))
        model.denoiser.cpu().init_weights(torch.Generator().manual_seed(seed))
    scoring = scoring_model(model, how)
    fill = filler(model, scoring, how.decode)
    lm = DiffusionLM(scoring, model.tokenizer, scorer, fill, seed=how.seed, progress=how.progress)
    return lm, {
        "kind": "diffurefill",
        "weights": "untrained" if name.startswith(RANDOM) else without_folders(model.name),
        "weights_sha256": weights_digest(model.denoiser.state_dict())[:12],
        "parameters": sum(p.numel() for p in model.denoiser.parameters()),
        "scored_by": "autoregressive" if scoring.causal else scorer.name,
        "scorer": None if scoring.causal else scorer.to_json(),
        "max_tokens": scoring.max_tokens,
        "dtype": str(scoring.dtype or torch.float32).removeprefix("torch."),
        "bos": "in front of every row",
    }


def scoring_model(model: LoadedModel, how: Reading) -> ScoringModel:
    device = how.device or default_device()
    trained = model.config.data.row_length
    length = how.max_length or trained
    if not 2 <= length <= trained:
        raise UserError(f"--max-length {length}: the model was trained on rows of {trained} tokens")
    return ScoringModel(
        model.denoiser.to(device).eval(),
        model.specials,
        length,
        device,
        causal=model.config.model.causal,
        dtype=_dtype(how.dtype, device),
        batch_tokens=how.batch_tokens,
    )


def filler(model: LoadedModel, scoring: ScoringModel, decode: str) -> Fill:
    """What fills the canvases of generated answers: a decode preset."""
    how = load_preset(decode).decode
    if scoring.causal:
        left = left_to_right(how)
        return lambda canvas, seeds: model.continue_text(canvas, left, seeds)
    denoiser, specials = scoring.denoiser, scoring.specials
    # What stands behind an EOS is cut off: a pass for it would be for nothing.
    return lambda canvas, seeds: generate(
        denoiser,
        canvas,
        how.stages,
        specials,
        seeds=seeds,
        block_length=how.block_length,
        stop_at_eos=True,
    )


def _dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """What to autocast to; None for float32."""
    if precision == "auto":
        return measuring_dtype(device)
    return torch.bfloat16 if precision == "bfloat16" else None


def _open_hf(where: str, how: Reading) -> tuple[Any, dict[str, Any]]:
    try:
        import transformers  # noqa: F401
        from lm_eval.models.huggingface import HFLM  # wants accelerate as well
    except ImportError:
        raise UserError(
            f"{HF}{where} needs the transformers library: pip install 'diffurefill[hf]'"
        ) from None

    device = how.device or default_device()
    dtype = _dtype(how.dtype, device) or torch.float32
    path = Path(where)
    options: dict[str, Any] = {"pretrained": where}
    if path.suffix == ".gguf":
        options = {"pretrained": str(path.parent), "gguf_file": path.name}
    try:
        lm = HFLM(**options, device=str(device), dtype=dtype, batch_size=how.batch_rows)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot load {HF}{where}: {first_line(error)}") from None
    return lm, {
        "kind": "hf",
        "weights": path.name if path.exists() else where,
        "weights_sha256": weights_digest(lm.model.state_dict())[:12],
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "scored_by": "autoregressive",
        "scorer": None,
        "max_tokens": lm.max_length,
        "dtype": str(dtype).removeprefix("torch."),
        "bos": "as its tokenizer has it",
    }


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
