"""What a step measures stays on the device until somebody asks."""

import torch

from diffurefill.data.packing import PackingCounts, Position
from diffurefill.objective.corruption import Corrupted
from diffurefill.train.metrics import IntervalMetrics, plain
from diffurefill.train.step import StepResult

B, T = 3, 8


def result(loss: float = 2.0, grad_norm: float = 0.5) -> StepResult:
    is_masked = torch.zeros(B, T, dtype=torch.bool)
    is_masked[:, :4] = True
    corrupted = Corrupted(
        canvas=torch.zeros(B, T, dtype=torch.int64),
        is_masked=is_masked,
        targets=torch.zeros(B, T, dtype=torch.int64),
        parts=torch.arange(B)[:, None].expand(B, T),
        t=torch.tensor([0.1, 0.4, 0.4]),
        num_eligible=torch.tensor([8, 8, 5]),
        has_prefix=torch.tensor([False, False, True]),
    )
    part_ce = torch.tensor([4.0, 8.0, 12.0])
    return StepResult(torch.tensor(loss), torch.tensor(grad_norm), part_ce, corrupted, 1e-3, B * T)


def gathered(*results: StepResult) -> IntervalMetrics:
    metrics = IntervalMetrics(clip_norm=1.0)
    for step, one in enumerate(results, start=11):
        metrics.add(one, PackingCounts(), step, None)
    return metrics


def test_an_interval_s_facts_are_sums_over_its_steps() -> None:
    facts = gathered(result(), result(grad_norm=3.0)).facts()
    assert facts["ce_by_t"] == {"0-0.25": 1.0, "0.25-0.5": 2.5, "0.5-0.75": None, "0.75-1": None}
    assert facts["clip_share"] == 0.5
    assert facts["prefix_share"] == 1 / 3
    assert facts["masked_share"] == 0.5
    assert "nonfinite_step" not in facts


def test_the_first_step_that_is_no_number_is_named() -> None:
    nan, inf = float("nan"), float("inf")
    assert gathered(result(), result(loss=nan), result(loss=nan)).facts()["nonfinite_step"] == 12
    assert gathered(result(grad_norm=inf), result()).facts()["nonfinite_step"] == 11


def test_a_step_number_may_come_again() -> None:
    """Where a worker that keeps its drift is set back to the global's step."""
    metrics = IntervalMetrics(clip_norm=1.0)
    places = [Position(num_rows=n) for n in range(4)]
    losses = [(5, 2.0), (6, 2.0), (5, float("nan")), (6, float("nan"))]
    for (step, loss), place in zip(losses, places, strict=True):
        metrics.add(result(loss=loss), PackingCounts(), step, place)
    facts = metrics.facts()
    assert facts["nonfinite_step"] == 5
    assert facts["nonfinite_rows_from"] == places[2].to_json()


def test_a_step_s_metrics_are_tensors_until_they_are_read() -> None:
    metrics = result().metrics()
    assert isinstance(metrics["loss"], torch.Tensor)
    assert plain(metrics) == {
        "loss": 2.0,
        "masked_ce": 2.0,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "masked_share": 0.5,
        "tokens": 24,
    }


def test_an_interval_without_a_step_has_nothing_to_say() -> None:
    facts = IntervalMetrics(clip_norm=1.0).facts()
    assert set(facts["ce_by_t"].values()) == {None}
    for share in ("clip_share", "prefix_share", "masked_share", "padding_share"):
        assert facts[share] == 0.0
