"""`diffurefill bench ...` on a tiny run: what is measured, shown and refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffurefill.commands.bench import BenchAttention, BenchOptimizer, BenchTrain
from diffurefill.commands.bench.shared import Bench, first_rows
from diffurefill.config import RunConfig, UserError
from diffurefill.data.loader import Loader
from diffurefill.model import denoiser
from diffurefill.model.denoiser import BlockCalls, Denoiser
from diffurefill.train import loop
from diffurefill.train import step as train_step
from diffurefill.train.flops import Peak, six_nd, step_flops
from diffurefill.train.timing import PARTS
from tests.tiny import tiny_config, write_corpus


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    known = Peak(1e9, "a peak for tests")
    monkeypatch.setattr("diffurefill.train.speed.peak_of", lambda *_: known)
    return tiny_config(write_corpus(tmp_path))


def test_json_has_the_figures_and_they_agree(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Loader.__next__
    bench = BenchTrain(settings=config, steps=4, json=True, device="cpu")
    assert bench.run() == 0
    assert Loader.__next__ is before
    found = json.loads(capsys.readouterr().out)
    speed, tokens = found["tokens_per_second"], 4 * 32 * (1 - found["padding_share"])
    assert speed == pytest.approx(tokens / found["step_seconds"], rel=0.01)
    assert found["steps"] == 4
    assert found["mfu_6nd"] == pytest.approx(six_nd(config.model) * speed / 1e9, rel=0.01)
    exact = step_flops(
        config.model,
        num_tokens=1,
        num_masked=found["masked_share"],
        num_pairs=found["visible_keys"],
    )
    assert found["gflops_per_token_exact"] == pytest.approx(exact.training / 1e9, rel=0.01)
    assert found["peak"] == "a peak for tests"
    assert set(found["shares"]) == set(PARTS)
    assert sum(found["shares"].values()) == pytest.approx(1.0, abs=0.001)
    assert found["shares"]["backward"] > 0
    assert found["data_share"] > 0
    assert 0 < found["visible_keys"] <= 32
    assert sum(found["backends"].values()) == 3
    assert not found["compiled_blocks"]


def test_the_table_shows_them(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    small = replace(config, train=replace(config.train, micro_batch_rows=2))
    assert BenchTrain(settings=small, steps=1, preset="tiny").run() == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("tiny", "tokens/s", "MFU by 6ND", "MFU exact", "attention", "a peak for tests"):
        assert words in shown
    assert "4 rows of 32, 2 at a time" in shown


def test_the_rows_that_were_taken_are_told(
    config: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the batch has, where more are asked for; fewer, where memory was too small."""
    many = replace(config, train=replace(config.train, micro_batch_rows=16))
    assert BenchTrain(settings=many, steps=1, json=True, device="cpu").run() == 0
    assert json.loads(capsys.readouterr().out)["micro_batch_rows"] == 4
    assert BenchOptimizer(settings=many, repeats=1, json=True, device="cpu").run() == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 1
    accumulate = train_step.accumulate

    def small(*arguments: Any) -> Any:
        if arguments[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return accumulate(*arguments)

    monkeypatch.setattr(train_step, "accumulate", small)
    assert BenchTrain(settings=many, steps=1, json=True, device="cpu").run() == 0
    assert json.loads(capsys.readouterr().out)["micro_batch_rows"] == 2


def test_no_step_begins_after_the_time(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BenchTrain(settings=config, steps=50, seconds=0.0, json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1


def test_muon_is_measured_where_the_run_uses_it(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    muon = replace(config, optim=replace(config.optim, optimizer="muon"))
    assert BenchTrain(settings=muon, steps=1, json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == "muon"


def test_a_backend_is_measured_on_demand_or_refused(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        BenchTrain(settings=config, steps=1, json=True, device="cpu", attention="sdpa").run() == 0
    )
    assert set(json.loads(capsys.readouterr().out)["backends"]) == {"sdpa"}
    with pytest.raises(UserError, match="ask for loop"):
        BenchTrain(settings=config, steps=1, device="cpu", attention="varlen").run()


@pytest.mark.parametrize("bench", [BenchTrain, BenchAttention, BenchOptimizer])
def test_a_device_that_is_not_there_is_refused(bench: type[Bench], config: RunConfig) -> None:
    with pytest.raises(UserError, match="no device 'cuda:99' here"):
        bench(settings=config, device="cuda:99").run()


def test_attention_is_timed_on_every_backend_that_runs(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BenchAttention(settings=config, repeats=1, json=True, device="cpu").run() == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["backends"]) == {"full", "sdpa", "loop"}
    assert set(found["refused"]) == {"flex", "varlen"}
    assert found["backends"]["full"]["over_full"] == 1.0
    rows = config.train.micro_batch_rows
    assert found["shape"] == {"rows": rows, "heads": 2, "positions": 32, "head_dim": 16}
    assert 0 < found["visible_keys"] <= 32
    assert found["by_rule"] in ("sdpa", "loop", "whole rows")


def test_optimisers_are_timed_beside_forward_and_backward(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BenchOptimizer(settings=config, repeats=1, json=True, device="cpu").run() == 0
    found = json.loads(capsys.readouterr().out)
    ours = {"AdamW, fused", "AdamW, foreach", "AdamW, cautious", "Muon", "Muon, cautious"}
    assert ours <= set(found["ms"]) <= {*ours, "forward and backward", "torch.optim.Muon"}
    assert found["share_of_micro_batch"]["forward and backward"] == 1.0
    assert all(ms > 0 for ms in found["ms"].values())


def test_optimisers_are_timed_beside_what_training_does(
    config: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's first rows with their documents, and blocks compiled where training has them so."""

    def compile_for_nothing(model: Denoiser) -> None:
        model.training_calls = BlockCalls(*denoiser.EAGER)

    documents = []
    hidden = Denoiser.hidden

    def seen(model: Denoiser, canvas: Tensor, doc_ids: Tensor, *rest: Any, **more: Any) -> Tensor:
        documents.append((doc_ids, denoiser.EAGER is not model.training_calls))
        return hidden(model, canvas, doc_ids, *rest, **more)

    monkeypatch.setattr(Denoiser, "hidden", seen)
    monkeypatch.setattr(loop, "why_eager", lambda *_: None)
    monkeypatch.setattr(loop, "compile_blocks", compile_for_nothing)
    small = replace(config, train=replace(config.train, micro_batch_rows=2))
    assert BenchOptimizer(settings=small, repeats=1, json=True, device="cpu").run() == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == "compiled"
    first = torch.from_numpy(first_rows(small).doc_ids)
    timed = documents[2:]  # behind both micro-batches of the step that makes training ready
    assert len(timed) == 3
    assert all(torch.equal(ids, first[:2]) and compiled for ids, compiled in timed)


def test_their_tables_name_what_was_measured(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BenchAttention(settings=config, repeats=1, preset="tiny").run() == 0
    assert BenchOptimizer(settings=config, repeats=1, preset="tiny").run() == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("attention of tiny", "loop", "over full", "optimisers of tiny", "Muon, cautious"):
        assert words in shown


def test_a_bench_of_no_repeats_is_refused(config: RunConfig) -> None:
    with pytest.raises(UserError, match="--repeats must be at least 1"):
        BenchAttention(settings=config, repeats=0).run()


def test_a_bench_of_no_steps_is_refused(config: RunConfig) -> None:
    with pytest.raises(UserError, match="--steps must be at least 1"):
        BenchTrain(settings=config, steps=0).run()


@pytest.mark.gpu
def test_it_runs_on_a_gpu(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert BenchTrain(settings=config, steps=2, json=True, device="cuda").run() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] != "cpu"
    assert found["memory_mb"] > 0
