"""One optimiser step: the same result for any micro-batch size, and no surprise on empty rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffurefill.config import ModelConfig, ObjectiveConfig, OptimConfig, RunConfig, TrainConfig
from diffurefill.data.packing import PackingCounts, Position, Rows
from diffurefill.model.denoiser import Denoiser
from diffurefill.optim.adamw import RunOptimizer, build_optimizer
from diffurefill.train.step import StepResult, train_step

V, B, T = 40, 8, 16
BOS, MASK, PAD = 0, 38, 39
CONFIG = RunConfig(
    model=ModelConfig(vocab_size=V, width=16, layers=2, heads=2, ffn_width=24),
    optim=OptimConfig(peak_lr=((0, 1e-2),), warmup_steps=1, total_steps=50),
    train=TrainConfig(batch_rows=B, micro_batch_rows=B),
)


def rows(seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 30, (B, T))
    doc_ids = np.repeat([[0] * 7 + [1] * 9], B, axis=0).astype(np.int32)
    ids[:, [0, 7]] = BOS
    ids[0, 10:], doc_ids[0, 10:] = PAD, -1
    lengths = np.full(B, T, dtype=np.int32)
    return Rows(ids, doc_ids, np.zeros_like(doc_ids), lengths, Position(), PackingCounts())


def build(config: RunConfig = CONFIG) -> tuple[Denoiser, RunOptimizer]:
    model = Denoiser(config.model)
    model.init_weights(torch.Generator().manual_seed(0))
    return model, build_optimizer(model, config.optim)


def step(
    model: Denoiser, optimizer: RunOptimizer, batch: Rows, config: RunConfig = CONFIG, at: int = 1
) -> StepResult:
    keys = [(0, "mask", at, 0, row) for row in range(len(batch.ids))]
    return train_step(model, optimizer, batch, config, step=at, keys=keys, mask_id=MASK, bos_id=BOS)


@pytest.mark.parametrize("loss", ["pooled", "row", "elbo"])
@pytest.mark.parametrize("micro", [1, 3, 4])
def test_the_micro_batch_size_changes_an_update_by_rounding_alone(loss: str, micro: int) -> None:
    config = replace(CONFIG, objective=ObjectiveConfig(loss=loss))
    whole, split = build(config), build(config)
    smaller = replace(config, train=TrainConfig(batch_rows=B, micro_batch_rows=micro))
    a = step(*whole, rows(), config)
    b = step(*split, rows(), smaller)
    assert b.loss.item() == pytest.approx(a.loss.item(), abs=1e-5)
    assert b.grad_norm.item() == pytest.approx(a.grad_norm.item(), rel=1e-4)
    for p, q in zip(whole[0].parameters(), split[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-4, rtol=0)


def test_a_step_without_anything_to_mask_changes_no_moment_and_is_no_nan() -> None:
    model, optimizer = build()
    batch = rows()
    empty = replace(batch, doc_ids=np.full_like(batch.doc_ids, -1))
    result = step(model, optimizer, empty)
    assert result.metrics()["loss"] == 0.0
    assert result.num_masked == 0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_same_key_gives_the_same_step() -> None:
    a, b = build(), build()
    assert step(*a, rows()).loss.item() == step(*b, rows()).loss.item()
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_gradient_is_clipped_after_it_is_whole() -> None:
    config = replace(CONFIG, optim=replace(CONFIG.optim, clip_norm=1e-3))
    model, optimizer = build(config)
    seen = {}
    optimizer_step = optimizer.step

    def spy() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen["norm"] = torch.stack([g.norm() for g in grads]).norm().item()
        optimizer_step()

    optimizer.step = spy
    result = step(model, optimizer, rows(), config)
    assert seen["norm"] == pytest.approx(1e-3, rel=1e-3)
    assert result.grad_norm.item() > 1e-2, "what is logged is the norm before clipping"


def test_padding_and_bos_are_counted_but_never_learned() -> None:
    result = step(*build(), rows())
    assert result.num_tokens == B * T - 6
    assert 0 < result.num_masked <= B * T - 6 - 2 * B


def test_forty_steps_learn_a_pattern() -> None:
    """A learning test: rows that repeat one token become predictable."""
    model, optimizer = build()
    rng = np.random.default_rng(1)
    first = last = 0.0
    for at in range(1, 41):
        ids = np.repeat(rng.integers(1, 30, (B, 1)), T, axis=1)
        batch = replace(rows(), ids=ids, doc_ids=np.zeros((B, T), np.int32))
        loss = step(model, optimizer, batch, at=at).loss.item()
        first, last = (loss, loss) if at == 1 else (first, loss)
    assert last < first - 0.8


def test_the_twin_learns_every_next_token_of_the_same_rows() -> None:
    """Loss and gradients of a causal step, by hand: no masks, the mean over all next tokens."""
    config = replace(CONFIG, model=replace(CONFIG.model, causal=True))
    batch = rows()
    model, optimizer = build(config)
    ids, doc_ids = torch.from_numpy(batch.ids), torch.from_numpy(batch.doc_ids)
    logits = model(ids, doc_ids)[:, :-1]
    has_next = (doc_ids[:, 1:] == doc_ids[:, :-1]) & (doc_ids[:, 1:] >= 0)
    plain = torch.nn.functional.cross_entropy(logits[has_next], ids[:, 1:][has_next])
    found = step(model, optimizer, batch, replace(config, train=TrainConfig(micro_batch_rows=3)))
    assert found.loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert found.num_masked == int(has_next.sum())
    assert not found.corrupted.has_prefix.any()
