"""Three fixed-seed steps end as they did when tests/golden/training.json was recorded.

A refactor must not change what is learned. On the machine and the torch that recorded it, the file
is met bit for bit; elsewhere products add in another order: 1e-6 of the loss is allowed, and 1e-5
of the gradient's norm, which moves more (1.5e-6 with another instruction set).
To record it anew: `python -m tests.train.test_golden`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffurefill.config import ModelConfig, ObjectiveConfig, OptimConfig, RunConfig, TrainConfig
from diffurefill.data.packing import PackingCounts, Position, Rows
from diffurefill.model.denoiser import Denoiser
from diffurefill.optim.adamw import build_optimizer
from diffurefill.train.step import train_step

GOLDEN = Path(__file__).parents[1] / "golden" / "training.json"
TOLERANCE = {"loss": 1e-6, "grad_norm": 1e-5}
B, T = 4, 128
BASE = RunConfig(
    model=ModelConfig(vocab_size=96, width=32, layers=2, heads=2, ffn_width=64),
    optim=OptimConfig(peak_lr=((0, 1e-2),), warmup_steps=1, total_steps=50),
    train=TrainConfig(batch_rows=B, micro_batch_rows=2),
)
ARMS = {
    "pooled": BASE,
    "row": replace(BASE, objective=ObjectiveConfig(loss="row")),
    "elbo": replace(BASE, objective=ObjectiveConfig(loss="elbo")),
    "muon": replace(BASE, optim=replace(BASE.optim, optimizer="muon", muon_dtype="float32")),
    "causal": replace(BASE, model=replace(BASE.model, causal=True)),
}


def rows(seed: int) -> Rows:
    """One row of a single document, ragged documents, a row cut into parts of 32, PAD."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 90, (B, T))
    doc_ids = np.zeros((B, T), np.int32)
    doc_ids[1:] = (np.arange(T) >= np.sort(rng.integers(1, T, (B - 1, 3)))[:, :, None]).sum(1)
    ids[3, 100:], doc_ids[3, 100:] = 95, -1
    lengths = np.array([T, T, 32, T], np.int32)
    return Rows(ids, doc_ids, np.zeros_like(doc_ids), lengths, Position(), PackingCounts())


def figures(config: RunConfig) -> list[dict[str, float]]:
    model = Denoiser(config.model)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = build_optimizer(model, config.optim)
    found = []
    for step in (1, 2, 3):
        keys = [(0, "mask", step, row) for row in range(B)]
        result = train_step(
            model, optimizer, rows(step), config, step=step, keys=keys, mask_id=94, bos_id=0
        )
        found.append({"loss": result.loss.item(), "grad_norm": result.grad_norm.item()})
    return found


@pytest.mark.parametrize("arm", ARMS)
def test_three_steps_end_as_they_were_recorded(arm: str) -> None:
    for now, then in zip(figures(ARMS[arm]), json.loads(GOLDEN.read_text())[arm], strict=True):
        for name, tolerance in TOLERANCE.items():
            assert now[name] == pytest.approx(then[name], rel=tolerance, abs=0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    record = {arm: figures(config) for arm, config in ARMS.items()}
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
