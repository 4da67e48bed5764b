import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from diffurefill.data.tokens.tokenizer import Tokenizer
from tests.data.tokens.kinds import KINDS, MODEL, SPACE, any_text, every_kind

WITH_PHRASES = {
    kind: made.with_phrases(["the cat", "on the", "sat on the"]) for kind, made in KINDS.items()
}


def ends_by_decoding(tokenizer: Tokenizer, ids: list[int], num_bytes: int) -> list[int]:
    """The slow way: the bytes that each beginning of `ids` decodes to, less the word start."""
    lengths = [len(tokenizer.decode_inner(ids[: n + 1]).encode()) for n in range(len(ids))]
    put_before = lengths[-1] - num_bytes if lengths else 0
    assert 0 <= put_before <= 1
    return [max(length - put_before, 0) for length in lengths]


@every_kind
@given(text=st.text(st.characters(max_codepoint=126), max_size=60))
def test_byte_ends_are_where_the_decoded_tokens_end(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    ends = tokenizer.byte_ends(ids, text)
    assert ends is not None
    assert ends.tolist() == ends_by_decoding(tokenizer, ids, len(text.encode()))


@every_kind
@given(text=any_text)
def test_byte_ends_of_any_text_rise_to_its_length_in_bytes(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    text = text.replace(SPACE, "")
    ids = tokenizer.encode(text)
    ends = tokenizer.byte_ends(ids, text)
    assert ends is not None
    assert ends.dtype == np.int64
    assert ends.shape == (len(ids),)
    assert (np.diff(ends, prepend=0) >= 0).all()
    assert (ends[-1] if len(ends) else 0) == len(text.encode())


def test_byte_ends_are_none_where_the_tokenizer_changed_the_text() -> None:
    tokenizer = KINDS["word start always"]
    assert tokenizer.byte_ends(tokenizer.encode(f"a{SPACE}b"), f"a{SPACE}b") is None
    backend = Backend.from_str(MODEL.to_json())
    backend.normalizer = normalizers.NFKC()
    changed = Tokenizer(backend)
    assert changed.byte_ends(changed.encode("\ufb01sh"), "\ufb01sh") is None
    assert changed.byte_ends(changed.encode("fish"), "fish") is not None


def test_specials_stand_for_no_bytes_and_a_byte_piece_for_one() -> None:
    lengths = MODEL.byte_lengths
    assert lengths.shape == (MODEL.num_pieces,)
    assert lengths[[MODEL.bos_id, MODEL.eos_id]].tolist() == [0, 0]
    assert (lengths[2:258] == 1).all()
    assert lengths[MODEL.encode("the")].sum() == 3


@every_kind
@given(text=any_text.filter(bool))
def test_uniform_bytes_cost_eight_bits_a_byte_in_every_tokenizer(kind: str, text: str) -> None:
    text = text.replace(SPACE, "x") + " the cat sat on the mat"
    for variant in (KINDS[kind], WITH_PHRASES[kind]):
        ends = variant.byte_ends(variant.encode(text), text)
        assert ends is not None
        nats = math.log(256) * np.diff(ends, prepend=0)  # -log p(token), p = 256 ** -bytes
        assert nats.sum() / (math.log(2) * len(text.encode())) == pytest.approx(8.0, rel=1e-12)
