"""A Trainer by itself: what it settles before the first step, and what it says of its speed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor

from diffurefill.config import RunConfig
from diffurefill.data.documents import open_corpus
from diffurefill.model.compiling import CACHE_VARIABLE, compile_blocks
from diffurefill.train import loop, speed
from diffurefill.train.flops import Peak, six_nd
from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer
from diffurefill.train.speed import StepClock, Work, exact_flops_per_token
from tests.tiny import tiny_config, write_corpus

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(speed, "peak_of", lambda *_: Peak(1e9, "a peak for tests"))
    return tiny_config(write_corpus(tmp_path))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def trainer(config: RunConfig, said: list[str]) -> Iterator[Trainer]:
    trainer = make(config, said)
    yield trainer
    trainer.close()


def make(config: RunConfig, said: list[str]) -> Trainer:
    corpus = open_corpus(config.data)
    tokenizer = make_tokenizer(config, corpus)
    trainer = Trainer(
        config, corpus, tokenizer, slot=0, interval_steps=8, device=CPU, report=said.append
    )
    trainer.load_weights(initial_weights(config), step=0)
    trainer.seek(None)
    return trainer


def test_an_interval_tells_its_speed(trainer: Trainer, config: RunConfig) -> None:
    results = [trainer.take_step() for _ in range(3)]
    work = trainer.work
    facts = trainer.take_metrics()
    assert (work.steps, work.tokens) == (3, sum(r.num_tokens for r in results))
    assert work.masked == sum(r.num_masked for r in results)
    rate = facts["tokens_per_second"]
    assert rate > 0
    assert facts["mfu_6nd"] == pytest.approx(six_nd(config.model) * rate / 1e9)
    assert facts["mfu_exact"] == pytest.approx(exact_flops_per_token(config, work) * rate / 1e9)
    assert facts["peak"] == "a peak for tests"
    assert (facts["blocks"], facts["attention"]) == ("eager", "by rule")
    assert 0 <= facts["data_wait_share"] <= 1
    assert "tokens_per_second" not in trainer.take_metrics()  # no step since


def test_time_between_steps_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 100.0, 103.0, 500.0, 505.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(now))
    clock = StepClock(CPU)
    for _ in range(2):
        clock.begin()
        clock.end()
    assert clock.take() == 4.0
    clock.begin()
    clock.end()
    assert clock.take() == 5.0


def test_on_a_gpu_a_step_that_never_ended_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 12.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = next(now)

        def elapsed_time(self, end: "Event") -> float:
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    clock = StepClock(torch.device("cuda"))
    clock.begin()  # and an error, or a hand on the keyboard
    clock.begin()
    clock.end()
    assert clock.take() == 2.0


def test_no_steps_have_no_flops() -> None:
    assert exact_flops_per_token(RunConfig(), Work()) == 0.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's own tracer
def test_a_compiler_that_fails_costs_a_line_and_no_step(
    config: RunConfig, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no such instruction")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(loop, "compile_blocks", lambda model: compile_blocks(model, backend=broken))
    eager = weights_after_two_steps(config, said)
    assert said == []
    compiled = replace(config, train=replace(config.train, compile="on"))
    for name, found in weights_after_two_steps(compiled, said).items():
        assert torch.equal(found, eager[name])
    assert [line.partition(",")[0] for line in said] == ["blocks: compiled", "blocks: eager"]
    assert "no such instruction" in said[1]


def test_no_compiler_costs_a_line_and_no_step(
    config: RunConfig, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    weights_after_two_steps(replace(config, train=replace(config.train, compile="on")), said)
    assert len(said) == 1
    assert "no C++ compiler" in said[0]


def weights_after_two_steps(config: RunConfig, said: list[str]) -> dict[str, Tensor]:
    torch._dynamo.reset()
    trainer = make(config, said)
    try:
        for _ in range(2):
            trainer.take_step()
        return {name: t.clone() for name, t in trainer.weights().items()}
    finally:
        trainer.close()
