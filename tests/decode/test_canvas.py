import pytest
import torch

from diffurefill.config import UserError
from diffurefill.decode.canvas import Specials, continuation, infill
from tests.decode.plain import specials
from tests.fakes import BOS, EOS, MASK, PAD


def test_continuation_is_bos_prompt_and_masks_with_padding_on_the_right():
    canvas = continuation([[5, 6], []], [2, 1], specials(), max_tokens=8)
    assert canvas.ids.tolist() == [[BOS, 5, 6, MASK, MASK], [BOS, MASK, PAD, PAD, PAD]]
    assert canvas.doc_ids.tolist() == [[0] * 5, [0, 0, -1, -1, -1]]
    assert canvas.num_fillable.tolist() == [2, 1]
    assert canvas.ids.dtype == torch.int64
    assert canvas.doc_ids.dtype == torch.int32


def test_one_number_of_tokens_serves_every_prompt():
    canvas = continuation([[5], [6]], 3, specials(), max_tokens=8)
    assert canvas.num_fillable.tolist() == [3, 3]


def test_infill_takes_several_gaps_anywhere():
    canvas = infill([[2, [5, 6], 1, [7]]], specials(), max_tokens=8)
    assert canvas.ids.tolist() == [[BOS, MASK, MASK, 5, 6, MASK, 7]]
    assert torch.equal(canvas.fillable, canvas.ids == MASK)


def test_rows_and_filled_leave_padding_and_given_ids_out():
    canvas = infill([[[5], 2], [1, [6, 7, 8]]], specials(), max_tokens=8)
    ids = canvas.ids.masked_fill(canvas.fillable, 9)
    assert canvas.rows(ids) == [[BOS, 5, 9, 9], [BOS, 9, 6, 7, 8]]
    assert canvas.filled(ids) == [[9, 9], [9]]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "at least one row"),
        ([[[5, 6]]], "nothing to fill"),
        ([[[5], 0]], "at least 1 token"),
        ([[[5], 3], [[5, MASK], 3]], "row 1.*MASK id"),
        ([[[PAD], 3]], "PAD id"),
        ([[[99], 3]], "outside the vocabulary"),
        ([[[-1], 3]], "outside the vocabulary"),
        ([[[5, 6], 6]], r"3 given tokens \(with BOS\) and 6 to fill make 9, the context holds 8"),
    ],
)
def test_a_row_that_cannot_be_filled_says_why(rows, says):
    with pytest.raises(UserError, match=says):
        infill(rows, specials(), max_tokens=8)


def test_a_row_may_fill_the_context_exactly():
    assert infill([[[5, 6], 5]], specials(), max_tokens=8).ids.shape == (1, 8)


def test_num_tokens_must_match_the_prompts():
    with pytest.raises(UserError, match="2 values of num_tokens for 1 prompts"):
        continuation([[5]], [1, 2], specials(), max_tokens=8)


@pytest.mark.parametrize("special", [BOS, MASK, PAD])
def test_a_special_id_cannot_be_declared_emittable(special):
    emittable = torch.zeros(10, dtype=torch.bool)
    emittable[special] = True
    with pytest.raises(UserError, match="must never be written"):
        Specials(BOS, EOS, MASK, PAD, emittable)
