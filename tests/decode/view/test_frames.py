from dataclasses import replace

import pytest

from diffurefill.config import DRAFT, REFILL, Stage
from diffurefill.decode.canvas import infill
from diffurefill.decode.generate import generate
from diffurefill.decode.view.frames import Cell, frames, printable, title
from tests.decode.plain import V, specials
from tests.decode.view.passes import BOS, MASK, decode, story, trajectory
from tests.fakes import BigramDenoiser


def test_cells_tell_given_masked_accepted_standing_and_refilled():
    first, second, third = (frame.cells for frame in frames(story(), decode))
    given = [Cell("given", ""), Cell("given", "He"), Cell("given", " said")]
    assert list(first[:3]) == given
    assert [c.kind for c in first[3:]] == ["accepted", "masked", "masked", "masked"]
    assert [c.kind for c in second[3:]] == ["standing", "accepted", "accepted", "accepted"]
    assert [c.kind for c in third[3:]] == ["refilled", "standing", "refilled", "standing"]


def test_a_cell_holds_its_probability_and_what_stood_there_where_that_differs():
    third = frames(story(), decode)[2].cells
    assert [c.text for c in third[3:]] == [" small", "\n", " small", "<eos>"]
    assert [c.old for c in third[3:]] == [" big", None, None, None]
    assert [round(c.probability, 3) for c in third[3:]] == [0.167, 0.25, 0.167, 0.25]


def test_a_frame_counts():
    first, second, third = frames(story(), decode)
    assert [f.num_masked for f in (first, second, third)] == [3, 0, 0]
    assert {f.num_fillable for f in (first, second, third)} == {4}
    assert (third.num_redone, third.num_changed) == (2, 1)
    assert first.mean_confidence == pytest.approx(0.5)
    assert second.mean_confidence == pytest.approx((0.5 + 3 * 0.25) / 4)
    assert first.summary == "draft 1/2: 1 of 4 filled"
    assert third.summary == "refill 1/1: 2 redone, 1 changed"


@pytest.mark.parametrize(("p", "level"), [(0.05, 0), (0.1, 1), (0.5, 2), (0.6, 3), (0.95, 4)])
def test_a_surer_cell_has_a_higher_level(p, level):
    assert Cell("standing", "x", p).level == level


def test_pieces_of_one_character_share_it():
    shown = frames(trajectory([BOS, 11, MASK, 13], [BOS, 11, 12, 13], given=1), decode)
    assert [c.text for c in shown[0].cells] == ["", " \ufffd", "", "\u597d"]
    assert [c.text for c in shown[1].cells] == ["", " \u4f60", "", "\u597d"]


def test_no_token_can_steer_a_terminal():
    (frame,) = frames(trajectory([BOS, 10], given=1), decode)
    assert frame.cells[1].text == "\u241b[31m"
    assert printable("a\tb\n\r\x7f\x9b\ud800") == "a\tb\n\u240d\ufffd\ufffd\ufffd"
    assert printable("a\u202eb\u2028") == "a\ufffdb\ufffd"


def test_the_title_is_what_was_given():
    assert title(frames(story(), decode)) == "He said ..."
    (gap,) = frames(trajectory([BOS, 6], given=1), decode)
    assert title([gap]) == "..."
    long = trajectory([BOS, *[5] * 30, 6], given=31)
    assert len(title(frames(long, decode))) <= 60


def test_every_row_of_a_real_generation_without_its_padding():
    canvas = infill([[[5], 20, [6]], [[7], 4]], specials(), max_tokens=32)
    done = generate(BigramDenoiser(V), canvas, (DRAFT, REFILL), specials(), seeds=[1, 2])
    for row, length in ((0, 23), (1, 6)):
        shown = frames(done.trajectory, lambda ids: " ".join(map(str, ids)), row)
        assert len(shown) == 20
        assert {len(frame.cells) for frame in shown} == {length}
        assert shown[-1].num_masked == 0
        assert [c.text for c in shown[-1].cells] == [
            str(i) for i in canvas.rows(done.ids)[row]
        ]  # fmt: skip
        assert [f.stage for f in shown] == ["draft"] * 12 + ["refill"] * 8


def test_behind_the_end_nothing_was_written_and_nothing_is_sure():
    """A text that is over with its first token: what fills the row counts for no confidence."""
    canvas = infill([[[5], 4]], specials(), max_tokens=8)
    stage = Stage(num_passes=0, order="left_to_right", tokens_per_pass=1)
    done = generate(
        BigramDenoiser(V), canvas, [stage], specials(), seeds=[0], stop=lambda ids: bool(ids)
    )
    (frame,) = frames(done.trajectory, str)
    assert [c.kind for c in frame.cells] == ["given", "given", "accepted", *["ended"] * 3]
    assert frame.mean_confidence == frame.cells[2].probability < 1


def test_a_later_block_is_named():
    first, second, _ = story()
    numbers = [f.number for f in frames([first, replace(second, block=1)], decode)]
    assert numbers == ["1/2", "2/2 of block 2"]


def test_uncounted_passes_are_not_given_a_total():
    canvas = infill([[[5], 3]], specials(), max_tokens=8)
    stage = Stage(num_passes=0, tokens_per_pass=1)
    passes = generate(BigramDenoiser(V), canvas, [stage], specials(), seeds=[0]).trajectory
    assert frames(passes, str)[1].summary == "draft 2: 2 of 3 filled"
