"""Who is timed, in which order, and that only written tokens count."""

from __future__ import annotations

import pytest
import torch

from diffurefill.config import DecodeConfig, ModelConfig
from diffurefill.evaluate import speed
from diffurefill.evaluate.speed import Contender

CPU = torch.device("cpu")
SMALL = ModelConfig(vocab_size=40, width=16, layers=1, heads=2, ffn_width=16)


def test_the_replay_asks_for_the_same_passes_as_the_decoder() -> None:
    denoiser = speed.random_model(SMALL, CPU, torch.float32)
    canvas = speed.random_canvas(40, 2, 24, CPU)
    for stages, num_passes in (
        (speed.ONE_PER_PASS, 24),
        (speed.eight_per_pass(24), 3),
        (DecodeConfig().stages, 20),
    ):
        ours, bare = speed.by_diffusion("ours", denoiser, canvas, stages)
        assert ours.run() == bare.run() == num_passes
        assert ours.num_tokens == bare.num_tokens == 48


def test_the_twin_takes_a_pass_a_token() -> None:
    twin = speed.random_model(ModelConfig(**{**vars(SMALL), "causal": True}), CPU, torch.float32)
    contender = speed.by_twin("twin", twin, speed.random_canvas(40, 2, 24, CPU))
    assert contender.run() == 24


def test_transformers_writes_all_it_is_asked_for() -> None:
    pytest.importorskip("transformers", reason="the AR baseline needs diffurefill[hf]")
    model = speed.llama_like(SMALL, 64, CPU, torch.float32)
    contender = speed.by_transformers("hf", model, 2, 24)
    assert contender.run() == 24
    assert contender.num_tokens == 48
    ours = speed.random_model(SMALL, CPU, torch.float32)
    count = sum(p.numel() for p in ours.parameters())
    assert sum(p.numel() for p in model.parameters()) == count


def test_contenders_take_turns_and_the_slow_are_run_once() -> None:
    order: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(name, lambda: order.append(name) or 3, 10)

    times = speed.time_in_turn(
        [contender("a"), contender("b")], CPU, warmups=1, repeats=2, seconds=60
    )
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert times["a"].num_passes == 3
    assert times["a"].num_runs == 2
    order.clear()
    times = speed.time_in_turn([contender("a")], CPU, warmups=2, repeats=5, seconds=-1)
    assert order == ["a"]
    assert times["a"].num_runs == 1
