"""16 bits: who may have them, weights cast once a step, and float16 steps that are skipped."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffurefill import runtime
from diffurefill.config import TrainConfig, UserError
from diffurefill.data.packing import PackingCounts
from diffurefill.optim import loss_scale
from diffurefill.optim.adamw import build_optimizer
from diffurefill.optim.loss_scale import LossScale
from diffurefill.runtime import measuring_dtype, training_dtype, writing_dtype
from diffurefill.train import gradients
from diffurefill.train.metrics import IntervalMetrics

from .test_step import CONFIG, B, build, rows, step

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def with_precision(precision: str, micro: int = B) -> Any:
    train = TrainConfig(batch_rows=B, micro_batch_rows=micro, precision=precision)
    return replace(CONFIG, train=train)


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_takes_bf16_only_where_the_hardware_has_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (8, 0) if native else (7, 5)
    )
    assert training_dtype(CUDA, "auto") == expected
    assert writing_dtype(CUDA) == expected
    assert writing_dtype(CUDA, "float32") == torch.float32
    assert training_dtype(CUDA, "fp32") is None
    assert training_dtype(CUDA, "fp16") == torch.float16
    if not native:
        with pytest.raises(UserError, match=r"emulate it: set train\.precision to auto or fp16"):
            training_dtype(CUDA, "bf16")


def test_of_two_gpus_the_one_that_is_meant_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {0: (8, 0), 1: (7, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability[d.index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = [training_dtype(torch.device("cuda", index), "auto") for index in (0, 1)]
    assert found == [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_trains_in_bf16_where_it_has_it_and_measures_in_fp32(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(runtime, "cpu_has_bf16", lambda: native)
    assert training_dtype(CPU, "auto") == (torch.bfloat16 if native else None)
    assert training_dtype(CPU, "fp32") is None
    assert writing_dtype(CPU) == torch.float32
    assert measuring_dtype(CPU) is None


def test_a_cpu_never_trains_in_fp16() -> None:
    assert training_dtype(CPU, "bf16") == torch.bfloat16
    with pytest.raises(UserError, match="fp16 is for GPUs without bf16: set auto"):
        step(*build(), rows(), with_precision("fp16"))


class Casts(TorchDispatchMode):
    """Counts casts of matrices to 16 bits, by the matrix they read."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.counts = {p.data_ptr(): 0 for p in model.parameters() if p.ndim == 2}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            pointer = args[0].data_ptr()
            if pointer in self.counts:
                self.counts[pointer] += 1
        return func(*args, **kwargs)


def test_weights_are_cast_once_a_step_however_many_micro_batches() -> None:
    model, optimizer = build()
    with Casts(model) as casts:
        step(model, optimizer, rows(), with_precision("bf16", micro=2))
    assert set(casts.counts.values()) == {1}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    states = [t for s in optimizer.parts["adamw"].state.values() for t in s.values()]
    assert {t.dtype for t in states} == {torch.float32}


def test_bf16_steps_stay_near_those_in_fp32() -> None:
    whole, half = build(), build()
    a = step(*whole, rows(), CONFIG)
    b = step(*half, rows(), with_precision("bf16", micro=3))
    assert b.loss.item() == pytest.approx(a.loss.item(), rel=5e-3)
    assert b.grad_norm.item() == pytest.approx(a.grad_norm.item(), rel=5e-2)


# --- float16 -------------------------------------------------------------------------------------


@pytest.fixture
def in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes in float16 too, only slowly: enough to see the scaling."""
    monkeypatch.setattr(gradients, "training_dtype", lambda *_: torch.float16)


@pytest.mark.usefixtures("in_float16")
def test_scaling_changes_no_figure_of_a_step() -> None:
    scaled, plain = build(), build()
    plain[1].loss_scale = LossScale(value=1.0)
    a, b = step(*scaled, rows()), step(*plain, rows())
    assert a.loss_scale == 2.0**16
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-6)
    assert a.grad_norm.item() == pytest.approx(b.grad_norm.item(), rel=1e-2)
    assert a.metrics()["skipped"] == 0


@pytest.mark.usefixtures("in_float16")
def test_a_step_whose_gradients_overflow_is_skipped_counted_and_stops_nothing() -> None:
    model, optimizer = build()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.loss_scale = LossScale(value=2.0**24, good_steps=7)
    metrics = IntervalMetrics(clip_norm=1.0)
    batch = rows()
    result = step(model, optimizer, batch)
    assert result.is_skipped
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.parts["adamw"].state, "no moment has moved"
    assert optimizer.loss_scale == LossScale(value=2.0**23, good_steps=0)
    metrics.add(result, PackingCounts(), 1, None)
    facts = metrics.facts()
    assert facts["skipped_steps"] == 1
    assert facts["clip_share"] == 0.0
    assert "nonfinite_step" not in facts
    while step(model, optimizer, batch).is_skipped:
        pass
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class Elsewhere:
    """Torch's norm of no gradients: a zero that lies on the CPU, whatever the model lies on."""

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.zeros((), device=device)


def nothing_to_mask() -> Any:
    batch = rows()
    return replace(batch, doc_ids=np.full_like(batch.doc_ids, -1))


@pytest.mark.usefixtures("in_float16")
def test_the_norm_of_no_gradients_is_brought_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: Elsewhere())
    result = step(*build(), nothing_to_mask())
    assert result.grad_norm.device == result.loss.device
    assert not result.is_skipped


@pytest.mark.gpu
def test_a_float16_step_on_a_gpu_may_have_nothing_to_mask() -> None:
    config = with_precision("fp16")
    model = build(config)[0].to(CUDA)
    result = step(model, build_optimizer(model, config.optim), nothing_to_mask(), config)
    assert result.grad_norm.device == result.loss.device
    assert result.metrics()["skipped"] == 0


@pytest.mark.usefixtures("in_float16")
def test_a_loss_that_is_no_number_is_no_overflow_and_is_named() -> None:
    model, optimizer = build()
    with torch.no_grad():
        model.embedding.weight[3] = float("nan")
    metrics, batch = IntervalMetrics(clip_norm=1.0), rows()
    result = step(model, optimizer, batch)
    assert not result.is_skipped
    metrics.add(result, PackingCounts(), 5, None)
    assert metrics.facts()["nonfinite_step"] == 5


def test_at_factor_one_an_overflow_is_the_gradients_own() -> None:
    scale = LossScale(value=1.0)
    assert not scale.is_too_large(True, False)
    scale.update(overflowed=True)
    assert scale.value == 1.0


def test_the_factor_grows_after_enough_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    scale = LossScale(value=8.0)
    for _ in range(3):
        scale.update(overflowed=False)
    assert scale == LossScale(value=16.0, good_steps=0)
    largest = LossScale(value=loss_scale.LARGEST, good_steps=2)
    largest.update(overflowed=False)
    assert largest == LossScale(value=loss_scale.LARGEST, good_steps=0)


@pytest.mark.usefixtures("in_float16")
def test_a_resumed_run_goes_on_with_its_factor() -> None:
    model, optimizer = build()
    step(model, optimizer, rows())
    optimizer.loss_scale = LossScale(value=512.0, good_steps=11)
    other_model, other = build()
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    assert other.loss_scale == LossScale(value=512.0, good_steps=11)
    a, b = step(model, optimizer, rows(1), at=2), step(other_model, other, rows(1), at=2)
    assert a.loss.item() == b.loss.item()
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_state_moves_between_machines_of_different_precision() -> None:
    fp32, scaled = build()[1], build()[1]
    scaled.loss_scale = LossScale(value=512.0)
    fp32.load_state_dict(scaled.state_dict())
    scaled.load_state_dict(build()[1].state_dict())
    assert scaled.loss_scale is None


def test_fp32_metrics_speak_of_no_factor() -> None:
    result = step(*build(), rows())
    assert "loss_scale" not in result.metrics()
    assert np.isfinite(result.loss.item())


def test_a_cpu_writes_in_fp32_unless_told_otherwise() -> None:
    assert writing_dtype(CPU) == torch.float32
    assert writing_dtype(CPU, "bfloat16") == torch.bfloat16
