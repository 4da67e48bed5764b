"""How often the host asks for a tensor's content while a pass runs: docs/decoding.md says so.

On a GPU each such question waits until everything asked before has been computed. The count is of
the operators that need an answer, whatever the device: `nonzero`, masks as indices, scalars; and of
`Run.ask`, through which passes ask in so many words. The meta device has no content to give at all.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffurefill.config import DRAFT, REFILL, DecodeConfig, Stage
from diffurefill.decode.canvas import continuation
from diffurefill.decode.generate import _Loop, generate
from diffurefill.decode.passes import Region
from diffurefill.decode.run import Run
from diffurefill.decode.sampling import CHUNK_ELEMENTS
from tests.decode.plain import specials
from tests.decode.test_refill import model

ASKING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}
ONE_BY_ONE = Stage(num_passes=0, tokens_per_pass=1, temperature=(0.0, 0.0))


class Asked(TorchDispatchMode):
    """Counts what asks, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in ASKING or by_mask:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def questions(stages: tuple[Stage, ...], lengths: list[int], monkeypatch, **options) -> list[int]:
    """How many from the end of each pass to that of the next."""
    denoiser, asked, ends = model(2), Asked(), []
    ask = Run.ask

    def counted(run: Run, numbers: torch.Tensor):
        asked.counts["ask"] += 1
        return ask(run, numbers)

    monkeypatch.setattr(Run, "ask", counted)
    # Under inference_mode a scalar's content is handed out where no dispatch mode sees it.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode))
    prompts = [[5 + b] for b in range(len(lengths))]
    canvas = continuation(prompts, lengths, specials(), max_tokens=64)
    with asked:
        generate(
            denoiser, canvas, stages, specials(), seeds=list(range(len(lengths))),
            on_pass=lambda _: ends.append(asked.counts.total()), **options,
        )  # fmt: skip
    assert asked.counts["ask"] >= 2, "before the first pass and after the last"
    return [after - before for before, after in pairwise(ends)]


@pytest.mark.parametrize("lengths", [[20], [20, 9], [50, 3, 1]])
@pytest.mark.parametrize(
    "stages",
    [
        (DRAFT, REFILL),
        (replace(DRAFT, quota="cosine", commit_gap=1), replace(REFILL, order="random")),
        (replace(DRAFT, num_passes=5, temperature=(0.0, 2.0), order="margin"), REFILL, DRAFT),
        (replace(ONE_BY_ONE, order="left_to_right"),),
        (replace(ONE_BY_ONE, tokens_per_pass=8, order="middle"), REFILL),
    ],
)
def test_a_pass_along_a_schedule_asks_nothing(stages, lengths, monkeypatch):
    assert not any(questions(stages, lengths, monkeypatch, min_tokens=2))


def test_a_block_asks_once_at_its_end(monkeypatch):
    each = questions((DRAFT, REFILL), [30, 12], monkeypatch, block_length=10)
    assert Counter(each) == {0: len(each) - 2, 1: 2}


@pytest.mark.parametrize(
    ("stages", "most"),
    [
        ((replace(ONE_BY_ONE, tokens_per_pass=8, commit_gap=2),), 1),
        ((Stage(num_passes=0, quota="threshold", bound=0.3, temperature=(0.0, 0.0)),), 1),
        ((Stage(num_passes=6, quota="one_per_run", commit_gap=2), REFILL), 1),
        ((DRAFT, replace(REFILL, sure_above=0.9)), 1),
        ((DRAFT, replace(REFILL, remask_cap=1, stop_unchanged=True)), 1),
        ((DRAFT, replace(REFILL, confidence="regrouped")), 1),
        ((DRAFT, replace(REFILL, confidence="regrouped", stop_unchanged=True)), 2),
        ((DRAFT, replace(REFILL, confidence="shadow")), 5),
        ((replace(DRAFT, refresh_every=3), replace(REFILL, refresh_every=3)), 2),
        ((replace(DRAFT, commit_gap=3), replace(REFILL, commit_gap=3)), 4),
    ],
)
def test_other_passes_ask_no_more_often_than_the_page_says(stages, most, monkeypatch):
    assert max(questions(stages, [20, 9], monkeypatch)) == most


def test_the_gap_is_asked_for_only_where_nobody_can_know_what_it_left(monkeypatch):
    stage = replace(ONE_BY_ONE, tokens_per_pass=4, commit_gap=2)
    each = questions((stage,), [40], monkeypatch)
    assert each[:7] == [0] * 7
    assert any(each)


def test_the_card_runs_on_a_device_that_cannot_answer(monkeypatch):
    monkeypatch.setitem(CHUNK_ELEMENTS, "meta", 1 << 10)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    known, config = specials(), DecodeConfig()
    canvas = continuation([[5], [6]], [20, 9], known, max_tokens=32)
    here = Run(model(2), canvas, known, [1, 2], torch.tensor([0, 2, 3]))

    class Mute(Run):
        def ask(self, numbers):
            if numbers.shape == (3, 2):  # the sizes, before the first pass
                return np.stack([here.num_fillable, here.lengths, [here.rows_are_whole] * 2])
            assert numbers.numel() == 0  # only whether all was finite, after the last
            return numbers

    there = torch.device("meta")
    forbidden = torch.tensor([0, 2, 3], device=there)
    run = Mute(model(2).to(there), canvas.to(there), known, [1, 2], forbidden)
    region = Region(run.canvas.fillable, run.num_fillable)
    with torch.inference_mode():
        records = list(_Loop(run, config, None).passes(0, region))
    assert len(records) == run.num_forward_passes == 20
    with pytest.raises(NotImplementedError, match="meta"):
        Run(run.denoiser, run.canvas, known, [1, 2], forbidden)
