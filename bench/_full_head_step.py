"""Steps of a plain eager transformer with the head on all positions, as the usual trainers of
masked diffusion take them: run by bench/train.py.

    python bench/_full_head_step.py SHAPE THREADS

For every line on stdin, `fp32` or `bf16` (autocast), it takes one optimiser step and answers with
its CPU seconds. A process of its own, because bench/train.py has told glibc to keep freed memory;
nobody tells it so here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from _plain_model import PlainModel
from diffurefill.config import RunConfig
from train import SEED, make_rows, shape_configs

DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def build_step(config: RunConfig, dtype: torch.dtype | None) -> Callable[[], None]:
    torch.manual_seed(SEED)
    model = PlainModel(config.model, config.data.row_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids, mask_id = torch.from_numpy(make_rows(config).ids), config.model.vocab_size - 1

    def step() -> None:
        t = torch.rand(len(ids), 1).clamp(min=1e-3).expand_as(ids)
        is_masked = torch.rand(ids.shape) < t
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            logits = model(torch.where(is_masked, mask_id, ids))
        ce = F.cross_entropy(logits[is_masked].float(), ids[is_masked], reduction="none")
        (ce / t[is_masked]).sum().div(ids.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    config = shape_configs()[sys.argv[1]]
    torch.set_num_threads(int(sys.argv[2]))
    steps = {name: build_step(config, dtype) for name, dtype in DTYPES.items()}
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.process_time()
        steps[line.strip()]()
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main()
