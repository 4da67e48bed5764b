"""Where texts end, and what a streamer is told: nothing that is kept may change by asking."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffurefill.config import DRAFT, REFILL, Stage, UserError
from diffurefill.decode.canvas import Canvas, continuation, infill
from diffurefill.decode.generate import Generation, generate
from tests.decode.plain import V, specials
from tests.decode.strategies import REFILLS, SEGMENTS, STAGES
from tests.fakes import EOS, MASK, BigramDenoiser, TableDenoiser

CARD = (DRAFT, REFILL)
LEFT_TO_RIGHT = Stage(num_passes=0, tokens_per_pass=1, order="left_to_right")
FULL_STOPS = (5, 9)


def decode(canvas: Canvas, stages: tuple[Stage, ...], seed: int = 0, **options) -> Generation:
    seeds = [seed + b for b in range(len(canvas.ids))]
    return generate(BigramDenoiser(V), canvas, stages, specials(), seeds=seeds, **options)


def wanting_eos_at(place: int, length: int = 40) -> TableDenoiser:
    """Sure of token 7 everywhere, and of EOS at one position."""
    table = torch.zeros(length, V)
    table[:, 7] = 20.0
    table[place, [7, EOS]] = torch.tensor([0.0, 20.0])
    return TableDenoiser(table)


def tail_of(canvas: Canvas, ids: Tensor, row: int) -> list[int]:
    """A row's ids behind the last given one."""
    fillable = canvas.fillable[row].tolist()
    real = int((canvas.doc_ids[row] >= 0).sum())
    start = max(i for i in range(real) if not fillable[i]) + 1
    return ids[row, start:real].tolist()


# --- stop_at_eos and stop ------------------------------------------------------------------------


def test_a_text_that_ends_costs_no_further_pass():
    canvas = continuation([[4]], 20, specials(), max_tokens=40)
    ended = generate(
        wanting_eos_at(6), canvas, [LEFT_TO_RIGHT], specials(), seeds=[0], stop_at_eos=True
    )
    assert ended.num_forward_passes == 5  # positions 2, 3, 4, 5 and EOS at 6
    assert canvas.filled(ended.ids) == [[7, 7, 7, 7, *[EOS] * 16]]
    assert (ended.confidence[0, 7:] == 0).all()
    assert ended.trajectory[-1].is_masked.sum() == 0
    free = generate(wanting_eos_at(6), canvas, [LEFT_TO_RIGHT], specials(), seeds=[0])
    assert free.num_forward_passes == 20


def test_a_block_behind_the_end_is_never_begun():
    canvas = continuation([[4]], 30, specials(), max_tokens=40)
    ended = generate(
        wanting_eos_at(6), canvas, CARD, specials(), seeds=[0], block_length=10, stop_at_eos=True
    )
    assert {record.block for record in ended.trajectory} == {0}
    assert ended.row_passes.tolist() == [ended.num_forward_passes]
    assert (ended.ids[0, 12:] == EOS).all()


def test_rows_end_on_their_own():
    canvas = continuation([[4], [4, 4, 4, 4, 4, 4]], 12, specials(), max_tokens=40)
    done = generate(  # the second row's gap begins behind the place of EOS
        wanting_eos_at(6), canvas, [LEFT_TO_RIGHT], specials(), seeds=[0, 1], stop_at_eos=True
    )
    assert done.row_passes.tolist() == [5, 12]
    assert canvas.filled(done.ids)[1] == [7] * 12


@settings(max_examples=100)
@given(
    st.lists(SEGMENTS, min_size=1, max_size=3),
    STAGES,
    st.lists(REFILLS, max_size=1),
    st.sampled_from([0, 4]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_an_ending_changes_no_text_up_to_it(rows, draft, refills, block_length, by_rule, seed):
    """Up to EOS, or to the first full stop, the tokens are those of a run that asks nobody."""
    rows = [[[6], *row] for row in rows]
    canvas, stages = infill(rows, specials(), max_tokens=64), (draft, *refills)

    def rule(ids: list[int]) -> bool:
        assert MASK not in ids
        return any(i in FULL_STOPS for i in ids)

    asked = {"stop": rule} if by_rule else {"stop_at_eos": True}
    ended = decode(canvas, stages, seed, block_length=block_length, **asked)
    free = decode(canvas, stages, seed, block_length=block_length)
    assert ended.num_forward_passes <= free.num_forward_passes
    assert not (ended.ids == MASK).any()
    ends = FULL_STOPS if by_rule else (EOS,)
    for b in range(len(rows)):
        mine, theirs = tail_of(canvas, ended.ids, b), tail_of(canvas, free.ids, b)
        last = next((i for i, token in enumerate(theirs) if token in ends), len(theirs))
        assert mine[: last + 1] == theirs[: last + 1]


def test_gaps_before_the_open_end_are_filled_to_the_last():
    """A text is not over while something in front of its end is missing."""
    canvas = infill([[[4], 3, [5], 8]], specials(), max_tokens=40)
    left = replace(LEFT_TO_RIGHT, order="random")
    done = generate(wanting_eos_at(6), canvas, [left], specials(), seeds=[3], stop_at_eos=True)
    assert canvas.filled(done.ids)[0][:4] == [7, 7, 7, EOS]
    assert done.ids[0, 5] == 5


# --- min_tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [CARD, (LEFT_TO_RIGHT,)])
@pytest.mark.parametrize("block_length", [0, 5])
def test_no_eos_before_the_least_length(stages, block_length):
    table = torch.zeros(40, V)
    table[:, EOS] = 9.0
    canvas = continuation([[4], [4, 4]], [20, 12], specials(), max_tokens=40)
    done = generate(
        TableDenoiser(table), canvas, stages, specials(),
        seeds=[0, 1], min_tokens=11, block_length=block_length, stop_at_eos=True,
    )  # fmt: skip
    for filled in canvas.filled(done.ids):
        assert EOS not in filled[:11]
        assert EOS in filled[11:]
    others = int(torch.as_tensor(specials().emittable).sum()) - 1
    first = done.confidence[0, 2:13]
    torch.testing.assert_close(first, torch.full((11,), 1 / others).log())


def test_a_negative_least_length_is_refused():
    with pytest.raises(UserError, match="must not be negative"):
        decode(continuation([[4]], 3, specials(), max_tokens=8), CARD, min_tokens=-1)


# --- streaming -----------------------------------------------------------------------------------


class Recorder:
    """What a streamer was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int]]] = []

    def put(self, value: Tensor) -> None:
        self.told.append(("put", value.tolist()))

    def put_draft(self, value: Tensor) -> None:
        self.told.append(("draft", value.tolist()))

    def end(self) -> None:
        self.told.append(("end", []))

    def settled(self) -> list[int]:
        return [i for kind, ids in self.told if kind == "put" for i in ids]


def test_a_text_in_one_block_is_put_as_given_drafted_pass_by_pass_and_put_whole():
    canvas = continuation([[5, 6]], 8, specials(), max_tokens=40)
    streamer = Recorder()
    done = decode(canvas, CARD, streamer=streamer)
    kinds = [kind for kind, _ in streamer.told]
    assert kinds == ["put", *["draft"] * done.num_forward_passes, "put", "end"]
    assert streamer.told[0][1] == canvas.ids[0, :3].tolist()
    drafts = [ids for kind, ids in streamer.told if kind == "draft"]
    assert drafts == [record.ids[0, 3:].tolist() for record in done.trajectory]
    assert MASK in drafts[0]
    assert streamer.told[-2][1] == done.ids[0, 3:].tolist()


@settings(max_examples=60)
@given(SEGMENTS, STAGES, st.lists(REFILLS, max_size=1), st.sampled_from([0, 1, 4]), st.booleans())
def test_what_was_put_is_the_text_and_never_changes(row, draft, refills, block_length, stop_at_eos):
    canvas, streamer = infill([row], specials(), max_tokens=64), Recorder()
    options = {"block_length": block_length, "stop_at_eos": stop_at_eos}
    done = decode(canvas, (draft, *refills), streamer=streamer, **options)
    assert streamer.settled() == done.ids[0].tolist()
    assert streamer.told[-1] == ("end", [])
    records, before = iter(done.trajectory), 0
    for kind, ids in streamer.told:
        if kind == "put":
            assert ids, "an empty put says nothing"
            assert ids == done.ids[0, before : before + len(ids)].tolist()
            before += len(ids)
        elif kind == "draft":
            assert ids == next(records).ids[0, before:].tolist()
    assert next(records, None) is None
    assert torch.equal(decode(canvas, (draft, *refills), **options).ids, done.ids)


def test_blocks_are_put_one_by_one_with_the_given_ids_behind_them():
    canvas = infill([[[5], 4, [6, 7], 2]], specials(), max_tokens=40)
    streamer = Recorder()
    done = decode(canvas, CARD, streamer=streamer, block_length=2)
    ids = done.ids[0].tolist()
    puts = [told for kind, told in streamer.told if kind == "put"]
    assert puts == [ids[:2], ids[2:4], ids[4:8], ids[8:]]


def test_a_streamer_follows_one_row():
    canvas = continuation([[5], [6]], 4, specials(), max_tokens=40)
    with pytest.raises(UserError, match="generate one at a time"):
        decode(canvas, CARD, streamer=Recorder())
