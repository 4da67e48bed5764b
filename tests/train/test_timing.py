"""Every second of a step belongs to one part, and timing leaves nothing behind."""

import itertools

import numpy as np
import pytest
import torch

import diffurefill.model.denoiser as denoiser_room
from diffurefill.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from diffurefill.data.loader import Loader
from diffurefill.data.packing import PackingCounts, Position, Rows
from diffurefill.model.compiling import compile_blocks, run_eagerly
from diffurefill.model.denoiser import Denoiser
from diffurefill.optim.adamw import build_optimizer
from diffurefill.runtime import wait_for
from diffurefill.train.step import train_step
from diffurefill.train.timing import PARTS, PartClock, is_compiled, timed_parts

CPU = torch.device("cpu")
CONFIG = RunConfig(
    model=ModelConfig(vocab_size=40, width=16, layers=2, heads=2, ffn_width=24),
    optim=OptimConfig(peak_lr=((0, 1e-2),), warmup_steps=1, total_steps=50),
    train=TrainConfig(batch_rows=4, micro_batch_rows=2),
)


def rows() -> Rows:
    ids = np.random.default_rng(0).integers(1, 30, (4, 16))
    doc_ids = np.repeat([[0] * 7 + [1] * 9], 4, axis=0).astype(np.int32)
    lengths = np.full(4, 16, dtype=np.int32)
    return Rows(ids, doc_ids, np.zeros_like(doc_ids), lengths, Position(), PackingCounts())


class Fixed(Loader):
    """A loader of one batch."""

    def __init__(self) -> None:
        self._batches = iter([rows()])

    def close(self) -> None: ...


def test_a_part_lasts_until_the_next_one() -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 5.5])
    clock = PartClock(CPU, lambda: next(now))
    assert clock.switch("blocks") == "rest"
    assert clock.switch("attention") == "blocks"
    assert clock.switch("blocks") == "attention"
    clock.switch("rest")
    expected = {"rest": 1.0, "blocks": 3.5, "attention": 1.0}
    assert {part: s for part, s in clock.seconds.items() if s} == expected
    assert clock.shares()["blocks"] == pytest.approx(3.5 / 5.5)
    assert sum(clock.shares().values()) == pytest.approx(1.0)


def test_nothing_timed_has_no_shares() -> None:
    clock = PartClock(CPU, lambda: 0.0)
    assert clock.shares() == dict.fromkeys(PARTS, 0.0)


def test_a_real_step_is_timed_in_all_its_parts_and_ends_the_same() -> None:
    def one_step(is_timed: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        model = Denoiser(CONFIG.model)
        model.init_weights(torch.Generator().manual_seed(0))
        optimizer = build_optimizer(model, CONFIG.optim)

        def step() -> None:
            keys = [(0, row) for row in range(4)]
            batch = next(Fixed())
            train_step(model, optimizer, batch, CONFIG, step=1, keys=keys, mask_id=38, bos_id=0)

        if not is_timed:
            step()
            return model.state_dict(), {}
        ticks = itertools.count()
        with timed_parts(model, optimizer, CPU, lambda: float(next(ticks))) as parts:
            step()
        assert parts.backends == {"sdpa": 2}
        assert "step" not in vars(optimizer)
        assert not model.embedding._forward_pre_hooks
        assert not model.final_norm._forward_pre_hooks
        return model.state_dict(), parts.seconds

    before = (Loader.__next__, torch.autograd.backward, denoiser_room.attention)
    weights, seconds = one_step(is_timed=True)
    assert (Loader.__next__, torch.autograd.backward, denoiser_room.attention) == before
    plain, _ = one_step(is_timed=False)
    for name, tensor in plain.items():
        assert torch.equal(weights[name], tensor)
    assert set(seconds) == set(PARTS)
    assert all(seconds[part] > 0 for part in PARTS)
    # one tick a switch: two micro-batches of two layers; forward twice, backward twice
    assert seconds["attention"] == 4
    assert seconds["blocks"] == 6
    assert seconds["head_loss"] == seconds["backward"] == 2
    assert seconds["waiting"] == seconds["corrupt"] == 1


@pytest.mark.parametrize("backend", ["sdpa", "loop"])
def test_the_backend_that_ran_is_named(backend: str) -> None:
    model = Denoiser(CONFIG.model)
    model.attention_backend = backend
    batch = rows()
    with timed_parts(model, build_optimizer(model, CONFIG.optim), CPU) as parts:
        model(torch.from_numpy(batch.ids), torch.from_numpy(batch.doc_ids))
        model(torch.from_numpy(batch.ids), None)
    assert parts.backends == {backend: 1, "whole rows": 1}


def test_an_error_in_a_step_leaves_nothing_behind() -> None:
    model = Denoiser(CONFIG.model)
    optimizer = build_optimizer(model, CONFIG.optim)
    before = (Loader.__next__, torch.autograd.backward, torch.nn.utils.clip_grad_norm_)
    with pytest.raises(ZeroDivisionError), timed_parts(model, optimizer, CPU):
        raise ZeroDivisionError
    assert (Loader.__next__, torch.autograd.backward, torch.nn.utils.clip_grad_norm_) == before
    assert not model.embedding._forward_pre_hooks


@pytest.mark.gpu
def test_on_a_gpu_a_part_is_not_over_before_its_work_is() -> None:
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device)
    wait_for(device)
    clock = PartClock(device)
    clock.switch("blocks")
    for _ in range(8):
        a @ a
    clock.switch("rest")
    assert clock.seconds["blocks"] > 8 * 2 * 8192**3 / 5e15


def test_compiled_blocks_are_told_from_eager_ones() -> None:
    model = Denoiser(CONFIG.model)
    assert not is_compiled(model)
    compile_blocks(model)  # wraps only; nothing is compiled before the first call
    assert is_compiled(model)
    run_eagerly(model)
    assert not is_compiled(model)
