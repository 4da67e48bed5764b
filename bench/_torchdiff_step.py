"""Steps of the published package slm388-torchdiff: run by bench/train.py, in a Python that has it.

    PYTHON bench/_torchdiff_step.py SHAPE_AS_JSON

Says {"version": ...} and then, for every line "MODE PRECISION" on stdin, takes one optimiser step
and answers with its CPU seconds. Model, loss, optimisers and step are the package's own
(`train_step`, `build_optimizer`); only sizes are set. MODE is `default` (canvases of 20 tokens,
Muon and AdamW: what its command line does unasked) or `plain` (whole rows, AdamW). PRECISION is
`shipped` (its step opens bf16 autocast on any device) or `fp32` (the same step without it).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torchdiff
from torchdiff.train import build_optimizer, train_step

CANVAS = {"default": 20, "plain": 0}
OPTIMIZER = {"default": "auto", "plain": "adamw"}


def build_step(shape: dict[str, int], mode: str) -> Callable[[str], None]:
    """A function that takes one step in a precision."""
    config = torchdiff.MDLModelConfig(
        d=shape["width"],
        vocab_size=shape["vocab_size"],
        num_heads=shape["heads"],
        head_dim=shape["width"] // shape["heads"],
        mlp_hidden_dim=shape["ffn_width"],
        diff_blocks_num=1,  # a step trains one of these: one of them has the whole depth
        layers_per_block=shape["layers"],
        max_position_embeddings=shape["row_length"],
        mask_token_id=shape["vocab_size"] - 1,
        attn_backend="sdpa",
        canvas_size=CANVAS[mode],
    )
    torch.manual_seed(0)
    model = torchdiff.MDLMModel(config)
    settings = {"total_steps": 1000, "warmup_steps": 10, "optimizer": OPTIMIZER[mode]}
    muon, adamw, scheduler = build_optimizer(model, settings)
    ids = torch.randint(0, shape["vocab_size"] - 1, (shape["batch_rows"], shape["row_length"]))
    taken = 0

    def step(precision: str) -> None:
        nonlocal taken
        taken += 1
        with without_autocast() if precision == "fp32" else contextlib.nullcontext():
            train_step(model, muon, adamw, ids, taken, 0, taken, config, 1000, torch.device("cpu"))
        scheduler.step()

    return step


@contextlib.contextmanager
def without_autocast() -> Any:
    original = torch.autocast
    torch.autocast = lambda *_, **__: contextlib.nullcontext()
    try:
        yield
    finally:
        torch.autocast = original


def main() -> None:
    shape = json.loads(sys.argv[1])
    torch.set_num_threads(shape["threads"])
    answers, sys.stdout = sys.stdout, sys.stderr  # the package prints
    steps = {mode: build_step(shape, mode) for mode in CANVAS}
    print(json.dumps({"version": torchdiff.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        mode, precision = line.split()
        began = time.process_time()
        steps[mode](precision)
        print(time.process_time() - began, file=answers, flush=True)


if __name__ == "__main__":
    main()
