"""What is said of a step's memory beforehand is what it takes, and the choice follows from it."""

from __future__ import annotations

import gc
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffurefill.cli import main
from diffurefill.config import ObjectiveConfig, RunConfig, TrainConfig, UserError, load_preset
from diffurefill.model.compiling import compile_blocks
from diffurefill.optim.newton_schulz import LARGE_FROM
from diffurefill.train import micro_batch as room
from diffurefill.train import step as step_room
from diffurefill.train.gradients import Arithmetic
from diffurefill.train.memory import CPU, arithmetic_on, largest_masked_share, predict
from diffurefill.train.micro_batch import MicroBatch, fitting_rows, micro_batch, sizes
from diffurefill.train.step import train_step

from .test_golden import BASE, rows
from .test_step import build

ROOT = Path(__file__).parents[2]
GIB = 2**30
DEMO = load_preset("demo")


@pytest.mark.parametrize("case", [(1, 1.0), (4, 1.0), (8, 0.5)])
def test_a_prediction_is_within_15_percent_of_what_the_allocator_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, case: tuple[int, float]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    bench = importlib.import_module("memory")
    gc.collect()  # what others left is not to be freed, and so counted, meanwhile
    found = bench.measure(bench.preset_of("demo", *case), CPU)
    assert abs(found["error"]) < 0.15, found


def test_a_footprint_names_where_the_bytes_are() -> None:
    how = Arithmetic(torch.bfloat16, chunk_bytes=2**20, pad_to=128)
    found = predict(DEMO, how, 4, 0.5)
    by_kind = found.bytes_by_kind
    parameters = sum(p.numel() for p in build(DEMO)[0].parameters())
    assert by_kind["weights"] == by_kind["gradients"] == 4 * parameters
    assert by_kind["16-bit copies"] == pytest.approx(2 * parameters, rel=0.02), "of matrices, once"
    assert by_kind["activations"] > 0
    assert found.total == sum(by_kind.values())
    whole = predict(DEMO, replace(how, chunk_bytes=None), 4, 0.5)
    assert by_kind["logits"] < whole.bytes_by_kind["logits"]
    lone = predict(replace(DEMO, train=replace(DEMO.train, batch_rows=4)), how, 4, 0.5)
    assert lone.bytes_by_kind["gradients"] < 4 * parameters, "not there yet when activations are"


def test_a_lower_activation_budget_takes_less() -> None:
    how = arithmetic_on("cpu", DEMO)
    totals = [
        predict(DEMO, replace(how, activation_budget=b), 16, 0.5).total for b in (1, 0.5, 0.1)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[2] < 0.9 * totals[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matrices_large_enough_to_be_decomposed_are_foreseen_as_well(precision: str) -> None:
    """Muon does these one by one on a CPU, and a prediction has no numbers to look at."""
    wide = load_preset("stand-38m")
    optim = replace(wide.optim, optimizer="muon")
    model = replace(wide.model, layers=1, vocab_size=1024)
    train = replace(wide.train, precision=precision)
    config = replace(wide, model=model, optim=optim, train=train)
    found = predict(config, arithmetic_on("cpu", config), 1, 0.5).bytes_by_kind
    embedding, matrices = (1024 * 512), found["weights"] // 4 - 1024 * 512
    assert min(model.width, model.ffn_width) >= LARGE_FROM
    # Muon keeps one moment of a matrix, AdamW two of the embedding; gains are lost in the rounding.
    assert found["optimiser"] == pytest.approx(4 * (matrices + 2 * embedding), rel=0.01)


@pytest.mark.parametrize("budget", [0.5, 0.01])
def test_recomputing_blocks_changes_no_bit_of_a_step(budget: float) -> None:
    config = replace(BASE, train=replace(BASE.train, activation_budget=budget))
    keys = [(0, row) for row in range(4)]
    plain, less = build(BASE), build(config)
    for (model, optimizer), c in ((plain, BASE), (less, config)):
        train_step(model, optimizer, rows(0), c, step=1, keys=keys, mask_id=94, bos_id=0)
    for p, q in zip(plain[0].parameters(), less[0].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_are_computed_again_as_well() -> None:
    config = replace(BASE, train=replace(BASE.train, activation_budget=0.5))
    keys = [(0, row) for row in range(4)]
    plain, less = build(BASE), build(config)
    compile_blocks(less[0], backend="aot_eager")
    a, b = (
        train_step(model, optimizer, rows(0), c, step=1, keys=keys, mask_id=94, bos_id=0)
        for (model, optimizer), c in ((plain, BASE), (less, config))
    )
    assert b.loss.item() == pytest.approx(a.loss.item(), rel=1e-6)
    assert b.grad_norm.item() == pytest.approx(a.grad_norm.item(), rel=1e-5)


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, float("nan")])
def test_a_budget_that_means_nothing_is_refused(budget: float) -> None:
    with pytest.raises(UserError, match=r"activation_budget must lie in \(0, 1\]"):
        TrainConfig(activation_budget=budget)


@pytest.mark.parametrize("objective", [ObjectiveConfig(), ObjectiveConfig(t_min=0, prefix_rows=0)])
def test_nearly_every_micro_batch_has_fewer_masks_than_is_counted_with(
    objective: ObjectiveConfig,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def uniform() -> torch.Tensor:
        return torch.rand(4000, 8, generator=generator)

    t = objective.t_min + (1 - objective.t_min) * uniform()
    shares = (t * (1 - (uniform() < objective.prefix_rows) * uniform())).mean(1)
    most = largest_masked_share(objective, 8, causal=False)
    assert 0.99 < (shares <= most).float().mean() <= 1.0
    assert most < shares.max() + 0.05
    assert largest_masked_share(objective, 8, causal=True) == 1.0


# --- the choice ----------------------------------------------------------------------------------


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB and 1 for every row of 2,048 tokens; a tenth with every block computed again."""

    def footprint(config: RunConfig, device_type: str, rows: int):
        share = config.train.activation_budget * config.data.row_length / 2048
        fixed = 2 * config.model.width / 2048
        return type("Found", (), {"total": int((fixed + rows * share) * GIB)})

    monkeypatch.setattr(room, "footprint", footprint)


def big(batch_rows: int = 48) -> RunConfig:
    base = load_preset("base-1b")
    return replace(base, train=TrainConfig(batch_rows=batch_rows))


def test_micro_batches_divide_the_batch_and_stop_where_more_brings_nothing() -> None:
    assert sizes(big(48), "cuda") == [1, 2, 3, 4, 6, 8, 12, 16]
    assert sizes(big(7), "cuda") == [1, 7]
    assert sizes(big(48), "cpu") == [1, 2, 3, 4]
    long_rows = replace(big(48), data=replace(big().data, row_length=16_384))
    assert sizes(long_rows, "cpu") == [1]


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(("free", "expected"), [(100, 16), (11.2, 8), (11.0, 6), (3.4, 1)])
def test_the_largest_that_fits_is_taken(free: float, expected: int) -> None:
    assert fitting_rows(big(), "cuda", int(free * GIB)) == expected


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(("free", "expected"), [(100, 4), (7, 4), (6.6, 3)])
def test_rows_of_before_stay_where_they_fit(free: float, expected: int) -> None:
    assert fitting_rows(big(), "cuda", int(free * GIB), before=4) == expected


@pytest.mark.usefixtures("linear")
def test_a_card_too_small_is_told_with_what_would_fit() -> None:
    message = (
        r"one row of 2048 tokens needs 3\.00 GiB and cuda has 2\.34 GiB to give; what would fit: "
        r"train\.activation_budget = 0\.01; data\.row_length = 512; --preset stand-38m"
    )
    with pytest.raises(UserError, match=message):
        fitting_rows(big(), "cuda", int(2.6 * GIB))
    with pytest.raises(UserError, match="nothing here would fit: take a larger machine"):
        fitting_rows(big(), "cuda", int(0.01 * GIB))


def test_an_explicit_number_of_rows_is_taken_as_it_is() -> None:
    config = replace(big(), train=TrainConfig(micro_batch_rows=5))
    assert micro_batch(config, CPU).rows == 5


def test_more_rows_at_once_than_a_batch_has_are_the_batch() -> None:
    config = replace(big(), train=TrainConfig(micro_batch_rows=16, batch_rows=4))
    assert micro_batch(config, CPU).rows == 4


def test_a_gpu_too_small_for_one_row_is_told_what_helps() -> None:
    with pytest.raises(UserError, match=r"set data\.row_length or train\.activation_budget lower"):
        MicroBatch(1).halve()
    at_once = MicroBatch(2)
    at_once.halve()
    with pytest.raises(UserError, match="too small for one row"):
        at_once.halve()


def test_a_gpu_with_less_memory_than_thought_halves_once_and_gets_the_same_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accumulate = step_room.accumulate

    def small(model, how, corrupted, doc_ids, weights, rows_at_once):
        sums = accumulate(model, how, corrupted, doc_ids, weights, rows_at_once)
        if rows_at_once > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sums

    keys = [(0, row) for row in range(4)]
    plain, squeezed = build(BASE), build(BASE)
    train_step(*plain, rows(0), BASE, step=1, keys=keys, mask_id=94, bos_id=0)
    monkeypatch.setattr(step_room, "accumulate", small)
    at_once = MicroBatch(4)
    train_step(*squeezed, rows(0), BASE, step=1, keys=keys, mask_id=94, bos_id=0, at_once=at_once)
    assert at_once.rows == 2
    assert "out of GPU memory: from here on 2 rows at once" in caplog.text
    for p, q in zip(plain[0].parameters(), squeezed[0].parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(UserError, match=r"set train\.micro_batch_rows lower"):
        at_once.halve()


# --- doctor --------------------------------------------------------------------------------------


def test_doctor_shows_where_memory_goes(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--train.batch-rows", "2", "--device", "cuda", "--memory-gib", "1"]
    assert main(["doctor", "--preset", "demo", *small]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("rows"))
    assert "16-bit copies" in lines[header]
    assert [line.split()[0] for line in lines[header + 1 : header + 3]] == ["1", "2"]
    assert lines[header + 2].endswith("yes")
    assert lines[-1].endswith("train.micro_batch_rows = 0 takes 2 rows at once")


def test_doctor_counts_with_muon_on_a_model_of_any_width(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = ["--model.layers", "1", "--model.vocab-size", "1024", "--train.batch-rows", "1"]
    muon = ["--optim.optimizer", "muon", "--memory-gib", "4"]
    assert main(["doctor", "--preset", "stand-38m", *size, *muon]) == 0
    out = capsys.readouterr().out
    assert "muon, rows of 512" in out
    assert out.splitlines()[-1].endswith("takes 1 rows at once")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda"], "say which model is to fit"),
        (["--memory-gib", "0"], "say which model is to fit"),
        (["--preset", "demo", "--memory-gib", "0"], "--memory-gib must be above 0"),
        (["--preset", "demo", "--memory-gib", "-2"], "--memory-gib must be above 0"),
        (["--preset", "demo", "--memory-gib", "nan"], "--memory-gib must be above 0"),
        (["--preset", "demo", "--memory-gib", "inf"], "--memory-gib must be above 0"),
        (["--preset", "demo", "--memory-gib", "0.01"], "MiB and cpu has 5.12 MiB to give"),
        (["--preset", "demo", "--device", "cuda"], "no cuda here to ask: give its --memory-gib"),
    ],
)
def test_doctor_says_what_it_would_need_to_know(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to ask")
    assert main(["doctor", *flags]) == 2
    assert message in capsys.readouterr().err
