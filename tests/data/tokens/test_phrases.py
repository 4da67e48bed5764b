import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.data.tokens.phrases import Ids, PhraseTable
from diffurefill.data.tokens.tokenizer import Tokenizer
from tests.data.tokens.kinds import KINDS, MODEL, any_text, every_kind

OWN = 2  # ids 0 and 1: few, so that phrases are frequent and overlap
rows = st.lists(st.integers(0, OWN - 1), max_size=30)
phrases = st.lists(
    st.lists(st.integers(0, OWN - 1), min_size=2, max_size=4).map(tuple), unique=True
)

PHRASES = ["the cat", "on the", "sat on the mat", "return self"]
TEXT = "return self; the cat sat on the mat, and the cat sat on the hat"


def replaced_slowly(sequences: list[Ids], ids: list[int]) -> list[int]:
    """The definition: at every place the longest phrase that begins there."""
    made: list[int] = []
    while ids:
        fitting = [p for p in sequences if tuple(ids[: len(p)]) == p]
        if fitting:
            longest = max(fitting, key=len)
            made.append(OWN + sequences.index(longest))
            ids = ids[len(longest) :]
        else:
            made.append(ids[0])
            ids = ids[1:]
    return made


@given(phrases, rows)
def test_replacing_is_greedy_from_the_left_and_longest_first(
    sequences: list[Ids], ids: list[int]
) -> None:
    table = PhraseTable(sequences, OWN)
    assert table.replace(ids) == replaced_slowly(sequences, ids)


@given(phrases, rows)
def test_expanding_undoes_replacing(sequences: list[Ids], ids: list[int]) -> None:
    table = PhraseTable(sequences, OWN)
    assert table.expand(table.replace(ids)) == ids


# --- in a tokenizer -------------------------------------------------------------------------------

WITH = {kind: made.with_phrases(PHRASES) for kind, made in KINDS.items()}


@every_kind
def test_a_phrase_is_one_token_as_it_reads_after_a_space(kind: str) -> None:
    plain, tokenizer = KINDS[kind], WITH[kind]
    assert tokenizer.num_pieces == plain.num_pieces + len(PHRASES)
    assert tokenizer.mask_id == plain.num_pieces + len(PHRASES)
    assert tokenizer.pad_id == tokenizer.mask_id + 1
    first = plain.num_pieces
    assert tokenizer.encode_inner(" the cat") == [first]
    ids = tokenizer.encode(TEXT)
    assert [i - first for i in ids if i >= first][-4:] == [0, 2, 0, 1]
    assert len(ids) < len(plain.encode(TEXT))


@every_kind
@given(text=any_text)
def test_a_text_with_phrases_comes_back(kind: str, text: str) -> None:
    tokenizer = WITH[kind]
    text = f"x{text} the cat sat on the mat{text}".replace("\u2581", "")
    ids = tokenizer.encode(text)
    plain = KINDS[kind]
    assert tokenizer.decode(ids) == plain.decode(plain.encode(text))
    assert tokenizer.decode(ids).removeprefix(" ") == text
    assert tokenizer.encode_batch([text]) == [ids]
    assert max(ids) >= KINDS[kind].num_pieces


@every_kind
def test_json_keeps_the_phrases(kind: str) -> None:
    again = Tokenizer.from_json(WITH[kind].to_json())
    assert again.encode(TEXT) == WITH[kind].encode(TEXT)
    assert again.to_json() == WITH[kind].to_json()
    assert again.num_pieces == WITH[kind].num_pieces


def test_json_without_phrases_is_the_library_s_own() -> None:
    assert MODEL.with_phrases([]).to_json() == MODEL.to_json()
    assert "phrases" not in json.loads(MODEL.to_json())


@every_kind
def test_phrases_stand_for_the_bytes_of_their_words(kind: str) -> None:
    tokenizer = WITH[kind]
    plain = KINDS[kind].num_pieces
    assert tokenizer.byte_lengths.shape == (tokenizer.num_pieces,)
    assert tokenizer.byte_lengths[plain:].tolist() == [1 + len(phrase) for phrase in PHRASES]
    ends = tokenizer.byte_ends(tokenizer.encode(TEXT), TEXT)
    assert ends is not None
    assert set(ends.tolist()) <= set(KINDS[kind].byte_ends(KINDS[kind].encode(TEXT), TEXT))


def test_phrases_may_be_written_and_mask_and_pad_may_not() -> None:
    tokenizer = WITH["trained"]
    allowed = tokenizer.emittable(tokenizer.num_pieces + 5)
    assert allowed[MODEL.num_pieces : tokenizer.num_pieces].all()
    assert not allowed[tokenizer.num_pieces :].any()
    assert not allowed[tokenizer.bos_id]


def test_phrases_of_one_token_or_given_twice_get_no_id() -> None:
    assert len(MODEL.encode_inner(" the")) == 1
    tokenizer = MODEL.with_phrases(["the", "the cat", "the cat", "on the"])
    assert tokenizer.num_pieces == MODEL.num_pieces + 2
    assert tokenizer.encode_inner(" on the") == [MODEL.num_pieces + 1]


def test_new_phrases_take_the_place_of_old_ones() -> None:
    tokenizer = WITH["trained"].with_phrases(["on the"])
    assert tokenizer.phrases == ("on the",)
    assert tokenizer.num_pieces == MODEL.num_pieces + 1


def test_decoding_takes_arrays_with_masks_and_unused_ids() -> None:
    tokenizer = WITH["trained"]
    ids = [tokenizer.bos_id, *tokenizer.encode("the cat sat"), tokenizer.mask_id, 10_000]
    assert tokenizer.decode(np.array(ids)) == "the cat sat"


@pytest.mark.parametrize("bad", [[(1,)], [(1, 2), (1, 2)]])
def test_a_table_takes_no_short_and_no_double_phrases(bad: list[Ids]) -> None:
    with pytest.raises(AssertionError):
        PhraseTable(bad, OWN)
