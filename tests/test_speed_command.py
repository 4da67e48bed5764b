"""`diffurefill bench speed` on a tiny model: what is shown and refused."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from diffurefill.commands.speed import HF_SAME, BenchSpeed
from diffurefill.config import ModelConfig, RunConfig, UserError
from diffurefill.model import compiling
from diffurefill.model.denoiser import num_parameters
from diffurefill.train.flops import Peak, step_flops

SMALL = RunConfig(model=ModelConfig(vocab_size=40, width=16, layers=1, heads=2, ffn_width=16))


def test_json_has_the_figures_and_they_agree(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = BenchSpeed(
        settings=SMALL, batches=(1, 2), num_tokens=16, repeats=1, warmups=0, json=True,
        device="cpu", out=tmp_path / "speed.json",
    )  # fmt: skip
    assert bench.run() == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "speed.json").read_text())["batches"] == found["batches"]
    for batch, num_tokens in (("1", 16), ("2", 32)):
        rows = found["batches"][batch]
        assert rows["one token a pass"]["num_passes"] == 16
        assert rows["AR, our twin"]["num_passes"] == 16
        assert rows["draft 12 + refill 8"]["num_passes"] <= 20
        for row in rows.values():
            assert row["tokens_per_second"] == pytest.approx(num_tokens / row["seconds"], rel=0.05)
        assert rows["8 tokens a pass"]["num_passes"] == 2
        assert rows["8 tokens a pass"]["pass_over_forward"] > 0
        for name, tokens in (("one token a pass", 1), ("8 tokens a pass", 8), ("AR, our twin", 1)):
            assert rows[name]["tokens_per_forward"] == tokens  # of a row, however many there are
        assert (HF_SAME in rows) != found["without_transformers"]


def test_what_cannot_be_done_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "diffurefill.commands.speed.bench_speed", lambda *_: pytest.fail("measured")
    )
    with pytest.raises(UserError, match="make it first"):
        BenchSpeed(settings=SMALL, out=tmp_path / "none" / "x.json").run()
    with pytest.raises(UserError, match="--warmups at least 0"):
        BenchSpeed(settings=SMALL, warmups=-1).run()


def test_the_limits_are_those_of_what_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffurefill.train.speed.peak_of", lambda *_: Peak(1e6, "set"))
    monkeypatch.setattr("diffurefill.train.speed.bandwidth_of", lambda _: 1e5)
    small = {"settings": SMALL, "num_tokens": 16, "repeats": 1, "warmups": 0, "device": "cpu"}
    assert BenchSpeed(**small, json=True).run() == 0
    rows = json.loads(capsys.readouterr().out)["batches"]["1"]
    length, still_open = 32 + 16, sum(range(1, 17))
    of_one_a_pass = {"num_tokens": 16 * length, "num_masked": still_open}
    of_ar = {"num_tokens": length - 1, "num_masked": 16}
    for name, asked, pairs in (
        ("one token a pass", of_one_a_pass, 16 * length**2),
        ("AR, our twin", of_ar, (length - 1) * length // 2),
    ):
        row, flops = rows[name], step_flops(SMALL.model, **asked, num_pairs=pairs).forward
        read = 16 * num_parameters(SMALL.model) * 4
        assert row["flop_limit_share"] * row["seconds"] == pytest.approx(flops / 1e6, rel=0.02)
        assert row["read_limit_share"] * row["seconds"] == pytest.approx(read / 1e5, rel=0.02)


def test_the_table_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"settings": SMALL, "num_tokens": 8, "repeats": 1, "warmups": 0, "device": "cpu"}
    assert BenchSpeed(**small).run() == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("batch 1: 8 new tokens", "one token a pass", "tok/pass", "AR, our twin"):
        assert words in shown


def test_our_decoders_may_run_compiled_blocks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path))
    for_writing = partial(compiling.compile_for_writing, backend="eager")
    monkeypatch.setattr(compiling, "compile_for_writing", for_writing)
    torch._dynamo.reset()
    counters.clear()
    small = {"settings": SMALL, "num_tokens": 8, "repeats": 1, "warmups": 0, "device": "cpu"}
    assert BenchSpeed(**small, compile=True).run() == 0
    assert "compiled blocks" in " ".join(capsys.readouterr().out.split())
    assert counters["stats"]["unique_graphs"] == 1  # a single layer is the last one
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"no C\+\+ compiler"):
        BenchSpeed(**small, compile=True).run()


def test_a_bench_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        BenchSpeed(settings=SMALL, num_tokens=0).run()


@pytest.mark.gpu
def test_it_runs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    bench = BenchSpeed(
        settings=SMALL, num_tokens=16, repeats=1, warmups=1, json=True, device="cuda"
    )
    assert bench.run() == 0
    assert set(json.loads(capsys.readouterr().out)["batches"]) == {"1", "32"}
