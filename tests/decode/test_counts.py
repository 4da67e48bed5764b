"""What the host reckons beforehand holds for what the device then does."""

from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import Stage
from diffurefill.decode import stages as schedule
from diffurefill.decode.counts import Counts, each, least_taken, masked_after, taken_back
from diffurefill.decode.order import Sureness, accept, choose
from tests.decode.strategies import REFILLS, STAGES

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=3)


def counted(mask: torch.Tensor) -> np.ndarray:
    return mask.sum(dim=1).numpy()


def fillable(sizes: list[int], seed: int) -> torch.Tensor:
    """(B, T) bool, scattered: runs of every length."""
    T = max(sizes) + 9
    order = torch.rand(len(sizes), T, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)
    return order < torch.tensor(sizes)[:, None]


def lies_within(counts: Counts, numbers: np.ndarray) -> bool:
    return bool(((counts.low <= numbers) & (numbers <= counts.high)).all())


@settings(max_examples=150, deadline=None)
@given(STAGES, SIZES, st.integers(0, 2**40))
def test_what_a_draft_leaves_masked_lies_within_the_bounds(stage: Stage, sizes, seed):
    open_ = fillable(sizes, seed)
    generator = torch.Generator().manual_seed(seed)
    n, known = counted(open_), Counts.exactly(counted(open_))
    for k in schedule.pass_indices(stage):
        score = torch.rand(open_.shape, generator=generator)
        sure = Sureness(score.log(), score.log(), score)
        kept = torch.from_numpy(each(n, partial(schedule.kept, stage, k)))
        quota = (open_.sum(dim=1) - kept).clamp(min=schedule.least_accepted(stage))
        last = schedule.is_last(stage, k)
        open_ = open_ & ~(open_ if last else accept(stage, score, open_, quota, sure))
        known = masked_after(stage, k, n, known)
        assert lies_within(known, counted(open_))
        if stage.commit_gap == 1 and not stage.is_adaptive:
            assert known.is_exact
        if not open_.any():
            break
    assert not open_.any()


@settings(max_examples=100, deadline=None)
@given(REFILLS, SIZES, st.integers(0, 2**40))
def test_what_a_refill_takes_back_lies_within_the_bounds(stage: Stage, sizes, seed):
    region = fillable(sizes, seed)
    score = torch.rand(region.shape, generator=torch.Generator().manual_seed(seed))
    count = torch.from_numpy(each(counted(region), partial(schedule.remask_count, stage)))
    known = taken_back(stage, counted(region))
    assert lies_within(known, counted(choose(score, region, count, stage.commit_gap)))
    may_end = stage.stop_unchanged or stage.sure_above is not None or stage.remask_cap is not None
    assert may_end or known.says_which_rows
    assert not may_end or not known.low.any()


def test_a_walk_takes_least_where_each_one_taken_stands_in_the_way_of_most():
    ids = torch.ones(1, 15, dtype=torch.bool)
    in_the_middle = torch.zeros(1, 15)
    in_the_middle[0, [2, 7, 12]] = 1.0
    taken = choose(in_the_middle, ids, torch.tensor([15]), 3)
    assert int(taken.sum()) == 3 == least_taken(np.array([15]), 3)[0]


def test_bounds_say_which_rows_have_some_unless_one_of_them_is_zero_alone():
    zero, some, more = (np.array([0, n]) for n in (0, 2, 3))
    assert Counts(some, more).says_which_rows
    assert not Counts(zero, more).says_which_rows
    assert Counts(zero, more).within(np.array([True, False])).says_which_rows
    assert Counts(some, more).total == 3
