"""The step as a GPU would take it, on a stand-in for one: right places, no waits, the same result.

What it cannot show: kernels and compilers. Those are for the tests marked `gpu`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from diffurefill.config import ObjectiveConfig, RunConfig
from diffurefill.data.documents import open_corpus
from diffurefill.evaluate.probe_sets import build_probe
from diffurefill.evaluate.probes import held_out_ce
from diffurefill.model import attention, backends
from diffurefill.model.denoiser import Denoiser
from diffurefill.model.segments import Backend
from diffurefill.optim.adamw import build_optimizer
from diffurefill.train.checkpoint import load_training_state, save_training_state
from diffurefill.train.loop import Trainer, initial_weights
from diffurefill.train.step import StepResult
from tests.gpu_stand_in import GPU, stand_in_gpu
from tests.tiny import tiny_config, write_corpus

from .test_loop import make
from .test_step import CONFIG, build, rows, step

A100, T4 = (8, 0), (7, 5)


def two_steps(config: RunConfig) -> list[StepResult]:
    model, optimizer = build(config)
    return [step(model, optimizer, rows(at), config, at=at) for at in (1, 2)]


def plain_flex(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask) -> Tensor:
    """FlexAttention by its mask, entry by entry."""
    (B, _, T, _), device = q.shape, q.device
    assert block_mask.shape == (B, 1, T, T)
    parts = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_indices)
    assert all(part is not None and part.device == device for part in parts)
    rows = torch.arange(B, device=device)[:, None, None]
    place = torch.arange(T, device=device)
    mask = block_mask.mask_mod(rows, torch.zeros_like(rows), place[:, None], place)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _: Tensor, *lengths: int, window_size: object
) -> Tensor:
    place = torch.arange(len(q), dtype=torch.int32, device=q.device)
    documents = torch.searchsorted(starts, place, right=True)
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = documents[:, None] == documents
    return F.scaled_dot_product_attention(*parts, attn_mask=mask)[0].transpose(0, 1)


KERNELS = plain_flex, plain_varlen


def on_gpu(
    config: RunConfig, backend: Backend | None = "sdpa"
) -> tuple[Denoiser, list[StepResult], list[dict[str, int]]]:
    """The model, what two steps gave, and what each waited for."""
    results, waits = [], []
    with stand_in_gpu(T4 if config.train.precision == "fp16" else A100) as gpu:
        model = build(config)[0].to(GPU)
        model.attention_backend = backend
        optimizer = build_optimizer(model, config.optim)
        for at in (1, 2):
            gpu.waits.clear()
            results.append(step(model, optimizer, rows(at), config, at=at))
            waits.append(dict(gpu.waits))
        results = [replace(r, loss=r.loss.cpu(), grad_norm=r.grad_norm.cpu()) for r in results]
    return model, results, waits


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_finds_everything_where_it_belongs_and_waits_for_nothing(
    precision: str, optimizer: str
) -> None:
    optim = replace(CONFIG.optim, optimizer=optimizer, muon_dtype="float32", cautious=True)
    train = replace(CONFIG.train, micro_batch_rows=3, activation_budget=0.5)
    plain = replace(CONFIG, optim=optim, train=replace(train, precision="fp32"))
    config = replace(plain, train=replace(train, precision=precision))
    model, found, waits = on_gpu(config)
    assert {p.device for p in model.parameters()} == {GPU}
    assert waits[0].pop("to cuda") == 1, "the table of angles, once"
    # float16 alone asks, whether the gradients are finite.
    assert waits == [{"tolist": 1} if precision == "fp16" else {}] * 2
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for ours, expected in zip(found, two_steps(plain), strict=True):
        assert not ours.is_skipped
        assert ours.loss.item() == pytest.approx(expected.loss.item(), rel=tolerance)
        assert ours.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=tolerance)


@pytest.mark.parametrize("backend", [None, "flex", "varlen"])
def test_documents_reach_the_kernels_of_a_gpu(
    backend: Backend | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = []

    def counted(kernel):
        return lambda *args, **kwargs: kernels.append(kernel) or kernel(*args, **kwargs)

    flex, varlen = map(counted, KERNELS)
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex)
    monkeypatch.setattr(attention, "_varlen_attn", lambda: varlen)
    monkeypatch.setattr(backends, "has_varlen", lambda: True)
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, width=32, heads=2),
        train=replace(CONFIG.train, precision="bf16"),
    )
    _, found, waits = on_gpu(config, backend)
    assert set(kernels) == {KERNELS[backend == "varlen"]}
    # The vmap inside BlockMask makes its own indices where C++ takes our tensors to be.
    assert waits[1].keys() <= {"index_put_"}
    plain = replace(config, train=replace(CONFIG.train, precision="fp32"))
    for ours, expected in zip(found, two_steps(plain), strict=True):
        assert ours.loss.item() == pytest.approx(expected.loss.item(), rel=2e-2)
        assert ours.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=2e-2)


def test_a_trainer_settles_on_what_runs_and_its_state_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object, **kwargs: object) -> Tensor:
        raise TypeError("no such kernel")

    for name in ("_compiled_flex_attention", "_varlen_attn"):
        monkeypatch.setattr(attention, name, lambda: missing)
    monkeypatch.setattr(backends, "has_varlen", lambda: True)
    config = tiny_config(write_corpus(tmp_path))
    model = replace(config.model, heads=1)  # a head dim that flex could take
    config = replace(config, model=model, train=replace(config.train, compile="off"))
    said: list[str] = []
    here = make(config, said)
    state = here.optimizer.state_dict()
    with stand_in_gpu(A100) as gpu:
        corpus, tokenizer = open_corpus(config.data), here.tokenizer
        options = {"slot": 0, "interval_steps": 8, "device": GPU, "report": said.append}
        there = Trainer(config, corpus, tokenizer, **options)
        there.load_weights(initial_weights(config), step=0)
        there.optimizer.load_state_dict(state)
        there.seek(None)
        there.take_step()
        gpu.waits.clear()
        there.take_step()
        assert not gpu.waits
        facts = there.take_metrics()
        weights, state = there.weights(), there.optimizer.state_dict()
        probe = build_probe(config, corpus, tokenizer)
        with torch.no_grad():  # inference mode knows no tensors of ours
            score = held_out_ce.__wrapped__
            ce = score(there.model, probe, mask_id=tokenizer.mask_id, device=GPU).mean
        save_training_state(tmp_path, weights=weights, optimizer_state=state, meta={})
        there.close()
    assert said[0].startswith("blocks: eager, for train.compile is off")
    assert said[1].startswith("attention: sdpa (sdpa ")
    assert facts["attention"] == "sdpa"
    assert facts["peak"] == "datasheet, dense 16-bit: 312 TFLOP/s"
    assert facts["tokens_per_second"] > 0
    here.load_weights(weights, step=2)
    found = held_out_ce(here.model, probe, mask_id=tokenizer.mask_id, device=torch.device("cpu"))
    assert found.mean == pytest.approx(ce, abs=1e-4)
    saved = load_training_state(tmp_path)
    assert saved is not None
    here.optimizer.load_state_dict(saved.optimizer_state)
    here.take_step()
    here.close()


@pytest.mark.parametrize("kind", ["twin", "self repair", "nothing to mask"])
def test_other_steps_run_there_too(kind: str) -> None:
    model = replace(CONFIG.model, causal=kind == "twin")
    objective = ObjectiveConfig(self_repair=1.0 if kind == "self repair" else 0.0)
    train = replace(CONFIG.train, precision="bf16")
    config = replace(CONFIG, model=model, objective=objective, train=train)
    with stand_in_gpu(A100):
        denoiser = build(config)[0].to(GPU)
        denoiser.attention_backend = "sdpa"
        batch = rows()
        if kind == "nothing to mask":
            batch.doc_ids[:] = -1
        result = step(denoiser, build_optimizer(denoiser, config.optim), batch, config)
        assert result.loss.device == result.grad_norm.device == GPU
        assert {k: float(v) for k, v in result.metrics().items()}["grad_norm"] >= 0.0
