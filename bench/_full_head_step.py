"""Steps of eager trainers with the head on all positions: run by bench/train.py.

    python bench/_full_head_step.py SHAPE THREADS

For every line on stdin, a trainer and a precision as in `llada fp32` or `dllm bf16` (autocast), it
takes one optimiser step and answers with its CPU seconds. A process of its own, because
bench/train.py has told glibc to keep freed memory; nobody tells it so here.

llada  a plain transformer; the cross-entropy of the masked positions, picked from all logits
dllm   transformers' Llama without a causal mask; the cross-entropy of all positions, of which the
       masked ones count (as ZHZisZZ/dllm does, dllm/core/trainers/mdlm.py)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _plain_model import PlainModel
from diffurefill.config import RunConfig
from diffurefill.evaluate.speed import llama_like
from train import SEED, make_rows, shape_configs

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def llada_model(config: RunConfig) -> nn.Module:
    torch.manual_seed(SEED)
    return PlainModel(config.model, config.data.row_length)


def llada_loss(model: Any, canvas: Tensor, ids: Tensor, t: Tensor, is_masked: Tensor) -> Tensor:
    ce = F.cross_entropy(model(canvas)[is_masked].float(), ids[is_masked], reduction="none")
    return (ce / t[is_masked]).sum() / ids.numel()


def dllm_model(config: RunConfig) -> nn.Module:
    cpu = torch.device("cpu")
    model = llama_like(config.model, config.data.row_length, cpu, torch.float32).train()
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def dllm_loss(model: Any, canvas: Tensor, ids: Tensor, t: Tensor, is_masked: Tensor) -> Tensor:
    logits = model(canvas, use_cache=False).logits
    ce = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    return (ce * is_masked / t).sum() / ids.numel()


TRAINERS = {"llada": (llada_model, llada_loss), "dllm": (dllm_model, dllm_loss)}


def build_step(trainer: str, config: RunConfig, dtype: torch.dtype) -> Callable[[], None]:
    build_model, loss = TRAINERS[trainer]
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids, mask_id = torch.from_numpy(make_rows(config).ids), config.model.vocab_size - 1

    def step() -> None:
        t = torch.rand(len(ids), 1).clamp(min=1e-3).expand_as(ids)
        is_masked = torch.rand(ids.shape) < t
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            found = loss(model, torch.where(is_masked, mask_id, ids), ids, t, is_masked)
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    config = shape_configs()[sys.argv[1]]
    torch.set_num_threads(int(sys.argv[2]))
    steps = cache(lambda trainer, name: build_step(trainer, config, PRECISIONS[name]))
    print("ready", flush=True)
    for line in sys.stdin:
        step = steps(*line.split())
        began = time.process_time()
        step()
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main()
