"""The steps of the published package slm388-torchdiff for bench/train.py, in its own process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from _other_process import steps_of
from diffurefill.config import RunConfig

MODES = {
    "torchdiff_default": "default shipped",
    "torchdiff_plain": "plain shipped",
    "torchdiff_default_fp32": "default fp32",
    "torchdiff_plain_fp32": "plain fp32",
}


def torchdiff_steps(
    python: str, config: RunConfig, threads: int, *, as_it_comes: bool
) -> AbstractContextManager[dict[str, Callable[[], float]]]:
    """Its steps in a process of `python`, which has slm388-torchdiff; in fp32 alone, or also with
    the bf16 autocast that it opens on any device."""
    model = config.model
    shape = {
        **{n: getattr(model, n) for n in ("vocab_size", "width", "layers", "heads", "ffn_width")},
        "batch_rows": config.train.batch_rows,
        "row_length": config.data.row_length,
        "threads": threads,
    }
    script = Path(__file__).with_name("_torchdiff_step.py")
    modes = {n: mode for n, mode in MODES.items() if as_it_comes or not mode.endswith("shipped")}
    return steps_of([python, str(script), json.dumps(shape)], modes)


def default_mode_tokens(config: RunConfig) -> dict[str, int]:
    """Tokens that a step in torchdiff's default mode reads, beside all of the batch."""
    B, T = config.train.batch_rows, config.data.row_length
    return {"read": B * max(1, T // 2 // 20) * 20, "of": B * T}
