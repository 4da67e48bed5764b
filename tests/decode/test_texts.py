"""What a generation is read as: where a text is cut, and what belongs to it."""

from collections.abc import Sequence

import pytest
import torch

from diffurefill.config import UserError
from diffurefill.decode.canvas import Canvas, infill
from diffurefill.decode.record import Generation
from diffurefill.decode.texts import Reader
from tests.decode.plain import specials
from tests.fakes import EOS

LETTERS = {4: "a", 5: "b", 6: "c", 7: ".", 8: "ab"}


def spell(ids: Sequence[int]) -> str:
    return "".join(LETTERS.get(i, "") for i in ids)


def reader(*stop: str) -> Reader:
    return Reader(spell, spell, EOS, stop)


def generated(canvas: Canvas, *rows: list[int]) -> Generation:
    """`canvas` with `rows` in its gaps; confidences fall from 1 by a tenth."""
    ids, confidence = canvas.ids.clone(), torch.zeros(canvas.ids.shape)
    for b, row in enumerate(rows):
        ids[b, canvas.fillable[b]] = torch.tensor(row)
        confidence[b, canvas.fillable[b]] = (1 - torch.arange(len(row)) / 10).log()
    return Generation(ids, confidence, 9, [], torch.arange(len(rows)) + 3)


def rows_of(*rows: list[list[int] | int]) -> Canvas:
    return infill(rows, specials(), max_tokens=32)


def test_every_row_has_its_text_ids_probabilities_and_passes():
    canvas = rows_of([[4], 3], [[5, 5], 1])
    first, second = reader().texts(canvas, generated(canvas, [5, 6, 7], [4]))
    assert (first.text, first.ids, first.num_passes) == ("abc.", [5, 6, 7], 3)
    assert first.confidences == pytest.approx([1.0, 0.9, 0.8])
    assert (second.text, second.ids, second.confidences) == ("bba", [4], [1.0])
    assert second.num_passes == 4


def test_a_text_is_cut_at_a_generated_eos_only():
    canvas = rows_of([[4, EOS], 4])
    (text,) = reader().texts(canvas, generated(canvas, [5, EOS, 6, EOS]))
    assert (text.text, text.ids, len(text.confidences)) == ("ab", [5], 1)


def test_a_stop_text_is_left_out_and_its_last_token_is_the_last_id():
    canvas = rows_of([[4], 5])
    (text,) = reader("bc").texts(canvas, generated(canvas, [4, 8, 6, 7, 7]))  # a | a ab c . .
    assert (text.text, text.ids) == ("aaa", [4, 8, 6])
    assert len(text.confidences) == 3


def test_the_first_of_several_stop_texts_counts_and_none_behind_eos():
    canvas = rows_of([[7], 4])
    (text,) = reader("c", ".").texts(canvas, generated(canvas, [4, 7, 6, 5]))
    assert text.text == ".a", "the dot of the prompt is no end"
    (text,) = reader("c").texts(canvas, generated(canvas, [4, EOS, 6, 5]))
    assert (text.text, text.ids) == (".a", [4])


def test_gaps_are_told_in_turn_and_what_stands_behind_stays():
    canvas = rows_of([[4], 2, [7], 1, [6]])
    (text,) = reader().texts(canvas, generated(canvas, [5, 6, 4]))
    assert (text.text, text.ids) == ("abc.ac", [5, 6, 4])


def test_the_rule_sees_a_stop_text_across_tokens():
    rule = reader("bc", "..").rule()
    assert rule is not None
    assert [rule(ids) for ids in ([8], [8, 6], [7, 4], [7, 7], [])] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert reader().rule() is None


def test_an_empty_stop_text_is_refused():
    with pytest.raises(UserError, match="would end every text"):
        reader("a", "").rule()
