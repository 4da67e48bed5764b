"""The GPU's way through a step, taken on a CPU, against the plain one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffurefill.config import ObjectiveConfig, TrainConfig
from diffurefill.data.packing import Rows
from diffurefill.objective.head import CHUNK_BYTES
from diffurefill.train import step as step_room
from diffurefill.train.gradients import (
    PAD_TO,
    PAD_TO_ON_CPU,
    Arithmetic,
    arithmetic_of,
    padded_positions,
)

from .test_golden import BASE, T, rows
from .test_step import build

B = 4
GPU_WAY = Arithmetic(dtype=None, chunk_bytes=8 * 96 * 16, pad_to=32)


def ragged() -> Rows:
    return rows(0)


def whole_rows() -> Rows:
    return replace(rows(0), doc_ids=np.zeros((B, T), np.int32))


def almost_nothing_to_mask() -> Rows:
    """Two rows of PAD alone: a micro-batch without any mask."""
    batch = rows(0)
    doc_ids = batch.doc_ids.copy()
    doc_ids[:2] = -1
    return replace(batch, doc_ids=doc_ids)


@pytest.mark.parametrize("loss", ["pooled", "row", "elbo"])
@pytest.mark.parametrize("make", [ragged, whole_rows, almost_nothing_to_mask])
def test_chunks_and_filled_up_counts_change_nothing(
    monkeypatch: pytest.MonkeyPatch, loss: str, make
) -> None:
    config = replace(
        BASE,
        objective=ObjectiveConfig(loss=loss),
        train=TrainConfig(batch_rows=B, micro_batch_rows=2),
    )
    keys, batch = [(0, row) for row in range(B)], make()
    plain, ours = build(config), build(config)
    results = []
    for (model, optimizer), how in ((plain, Arithmetic(None, None, 1)), (ours, GPU_WAY)):
        monkeypatch.setattr(step_room, "arithmetic_of", lambda *_, how=how: how)
        monkeypatch.setattr(optimizer, "step", lambda: None)
        monkeypatch.setattr(optimizer, "zero_grad", lambda: None)
        results.append(
            step_room.train_step(
                model, optimizer, batch, config, step=1, keys=keys, mask_id=94, bos_id=0
            )
        )
    a, b = results
    assert b.loss.item() == pytest.approx(a.loss.item(), rel=1e-6)
    torch.testing.assert_close(b.part_ce, a.part_ce, atol=1e-4, rtol=1e-6)
    for p, q in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(q.grad, p.grad, atol=1e-6, rtol=1e-5)


def test_positions_are_filled_up_to_a_multiple_and_never_beyond_the_rows() -> None:
    at = torch.zeros(3, 10, dtype=torch.bool)
    at[0, 4] = at[2, 9] = True
    assert padded_positions(at, 1).tolist() == [4, 29]
    assert padded_positions(at, 4).tolist() == [4, 29, 0, 1]
    assert len(padded_positions(at, 1024)) == 30
    assert padded_positions(torch.zeros_like(at), 8).tolist() == []


def test_a_gpu_computes_chunk_by_chunk_and_a_cpu_all_at_once() -> None:
    fp32 = TrainConfig(precision="fp32")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert arithmetic_of(cpu, fp32) == Arithmetic(None, None, 1)
    assert arithmetic_of(cuda, fp32) == Arithmetic(None, CHUNK_BYTES, PAD_TO)
    assert arithmetic_of(cpu, TrainConfig(precision="bf16")) == Arithmetic(
        torch.bfloat16, None, PAD_TO_ON_CPU
    )
