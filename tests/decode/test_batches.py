"""Rows in batches of like length: nothing changes but what they cost."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import DRAFT, REFILL, Stage
from diffurefill.decode import batches
from diffurefill.decode.batches import buckets, in_buckets
from diffurefill.decode.canvas import Canvas, infill
from diffurefill.decode.generate import Generation, generate
from tests.decode.plain import V, specials
from tests.decode.strategies import REFILLS, SEGMENTS, STAGES
from tests.fakes import BigramDenoiser

CPU = torch.device("cpu")


def cost(lengths: list[int], parts: list[list[int]], call_positions: int) -> int:
    return sum(len(part) * max(lengths[i] for i in part) + call_positions for part in parts)


def all_cuts(lengths: list[int]) -> list[list[list[int]]]:
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    inner = range(1, len(lengths))
    return [
        [order[a:b] for a, b in zip((0, *cut), (*cut, len(order)), strict=True)]
        for n in range(len(lengths))
        for cut in combinations(inner, n)
    ]


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=7),
    st.sampled_from([0, 10, 64, 500]),
    st.sampled_from([40, 200, 10**6]),
)
def test_buckets_are_the_cheapest_that_fit(lengths, call_positions, max_positions):
    found = buckets(lengths, call_positions=call_positions, max_positions=max_positions)
    assert sorted(i for part in found for i in part) == list(range(len(lengths)))

    def fits(parts: list[list[int]]) -> bool:
        sizes = [len(part) * max(lengths[i] for i in part) for part in parts]
        return all(
            size <= max_positions or len(part) == 1 for size, part in zip(sizes, parts, strict=True)
        )

    assert fits(found)
    cheapest = min(cost(lengths, cut, call_positions) for cut in all_cuts(lengths) if fits(cut))
    assert cost(lengths, found, call_positions) == cheapest


def test_like_lengths_stay_together_and_a_long_row_goes_alone():
    found = buckets([20, 200, 21, 22, 20], call_positions=64, max_positions=10**6)
    assert found == [[0, 4, 2, 3], [1]]


def decoded(canvas: Canvas, stages, seeds: list[int]) -> tuple[Generation, Generation]:
    """In buckets and in one batch."""

    def fill(some: Canvas, rows: list[int]) -> Generation:
        own = [seeds[row] for row in rows]
        return generate(BigramDenoiser(V), some, stages, specials(), seeds=own)

    return (
        in_buckets(canvas, fill, device=CPU, vocab_size=V),
        fill(canvas, list(range(len(seeds)))),
    )


@settings(max_examples=40)
@given(
    st.lists(SEGMENTS, min_size=1, max_size=6),
    STAGES,
    st.lists(REFILLS, max_size=1),
    st.sampled_from([0, 8]),
    st.integers(0, 2**40),
)
def test_every_row_is_token_for_token_the_row_alone(rows, draft, refills, call_positions, seed):
    canvas, stages = infill(rows, specials(), max_tokens=64), (draft, *refills)
    seeds = [seed + 7 * b for b in range(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(batches.CALL_POSITIONS, "cpu", call_positions)
        found, _ = decoded(canvas, stages, seeds)
    for b, row in enumerate(rows):
        alone = infill([row], specials(), max_tokens=64)
        wanted = generate(BigramDenoiser(V), alone, stages, specials(), seeds=[seeds[b]])
        T = wanted.ids.shape[1]
        assert torch.equal(found.ids[b, :T], wanted.ids[0])
        assert torch.equal(found.ids[b, T:], canvas.ids[b, T:])
        assert torch.equal(found.confidence[b, :T], wanted.confidence[0])
        assert found.row_passes[b] == wanted.row_passes[0]


def test_short_rows_do_not_pay_for_long_ones():
    rows = [[[5] * n, 8] for n in (1, 50, 2, 49, 1, 3)]
    canvas = infill(rows, specials(), max_tokens=64)
    found, whole = decoded(canvas, (DRAFT, REFILL), list(range(6)))
    assert torch.equal(found.ids, whole.ids)
    assert found.num_positions < 0.55 * whole.num_positions


def test_a_batch_holds_no_more_logits_than_it_may_and_calls_add_up(monkeypatch):
    monkeypatch.setattr(batches, "MAX_LOGITS", 2 * 10 * V)
    canvas = infill([[[5], 8]] * 5, specials(), max_tokens=64)  # rows of 10 positions with BOS
    num_rows = []

    def fill(some: Canvas, rows: list[int]) -> Generation:
        num_rows.append(len(rows))
        return generate(
            BigramDenoiser(V), some, [Stage(num_passes=3)], specials(), seeds=[0] * len(rows)
        )

    done = in_buckets(canvas, fill, device=CPU, vocab_size=V)
    assert sorted(num_rows) == [1, 2, 2]
    assert done.num_forward_passes == 3 * 3
    assert done.num_positions == 3 * 5 * 10
