import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "tokenizer"
MINICPM = SHARED / "minicpm4" / "tokenizer.json"

CODE = "def add(self, x):\n    if x > 0:\n        return self.total + x\n\n\nclass Sum:\n" * 20
MODEL = train_tokenizer([CODE, "the cat sat on the mat; the hat sat on the cat. " * 20], 420)

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
tricky_text = st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<0x0A>", "\u2581", " ", "\n", "\t", "\r\n", "\0", "a", "\u00e9"]
    )
).map("".join)


@given(any_text | tricky_text)
def test_any_text_comes_back_unchanged(text: str) -> None:
    assert MODEL.decode(MODEL.encode(text)) == text


@given(any_text | tricky_text)
def test_encoding_never_yields_a_special_token(text: str) -> None:
    assert {MODEL.bos_id, MODEL.eos_id}.isdisjoint(MODEL.encode(text))


def test_a_literal_byte_piece_is_not_read_as_that_byte() -> None:
    assert MODEL.encode("<0x0A>") != MODEL.encode("\n")
    assert MODEL.decode(MODEL.encode("<0x0A>")) == "<0x0A>"


@given(st.lists(any_text, max_size=5))
def test_a_batch_encodes_as_its_texts_one_by_one(texts: list[str]) -> None:
    assert MODEL.encode_batch(texts) == [MODEL.encode(text) for text in texts]


def test_decoding_skips_specials_mask_pad_and_unused_ids() -> None:
    cat = MODEL.encode("cat")
    others = [MODEL.bos_id, MODEL.eos_id, MODEL.mask_id, MODEL.pad_id, MODEL.num_pieces + 50]
    assert MODEL.decode(np.array([others[0], *cat, *others[1:]])) == "cat"


def test_bytes_that_are_no_utf8_decode_to_replacement_characters() -> None:
    half = MODEL.encode("\u2603")[:2]  # two of the snowman's three bytes
    assert MODEL.decode([*MODEL.encode("a"), *half, *MODEL.encode("c")]) == "a\ufffd\ufffdc"


def test_words_keep_their_space_and_lines_their_indentation() -> None:
    pieces = [MODEL.decode([piece]) for piece in MODEL.encode("\n    return self.total")]
    assert pieces == ["\n    ", "return", " self", ".", "total"]


def test_ids_are_pieces_then_mask_then_pad() -> None:
    assert (MODEL.mask_id, MODEL.pad_id) == (MODEL.num_pieces, MODEL.num_pieces + 1)
    assert MODEL.num_pieces <= 420
    assert max(MODEL.encode(CODE)) < MODEL.num_pieces


def test_decoding_may_emit_pieces_and_eos_only() -> None:
    vocab_size = MODEL.num_pieces + 10
    allowed = MODEL.emittable(vocab_size)
    assert allowed.shape == (vocab_size,)
    assert allowed.dtype == bool
    banned = {MODEL.bos_id, *range(MODEL.mask_id, vocab_size)}
    assert set(np.flatnonzero(~allowed).tolist()) == banned


def test_a_vocabulary_without_room_for_mask_and_pad_is_refused() -> None:
    MODEL.require_fits(MODEL.num_pieces + 2)
    with pytest.raises(UserError, match=f"needs at least {MODEL.num_pieces + 2}"):
        MODEL.require_fits(MODEL.num_pieces + 1)


def test_json_round_trip_keeps_every_id() -> None:
    again = Tokenizer.from_json(MODEL.to_json())
    text = CODE + "<s>\u2603"
    assert again.encode(text) == MODEL.encode(text)
    assert again.to_json() == MODEL.to_json()


def test_training_again_in_another_process_gives_the_same_tokenizer() -> None:
    # 40 characters tie in frequency for the last places of an alphabet of 37.
    text = "".join(chr(0x4E00 + n) for n in range(40))
    code = (
        "import hashlib, sys; from diffurefill.data.tokenizer import train_tokenizer\n"
        "made = train_tokenizer([sys.argv[1]], 300).to_json()\n"
        "print(hashlib.sha256(made.encode()).hexdigest())"
    )
    command = [sys.executable, "-c", code, text]
    outputs = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(3)}
    assert len(outputs) == 1


def test_the_vocabulary_is_no_larger_than_asked() -> None:
    for num_pieces in (300, 333, 350):
        assert train_tokenizer([CODE], num_pieces).num_pieces <= num_pieces


@pytest.mark.parametrize("texts", [[], [""]])
def test_training_on_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"add text to data\.sources"):
        train_tokenizer(texts, 1024)


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="use at least 300"):
        train_tokenizer([CODE], 258)


def _without(*names: str) -> str:
    record = json.loads(MODEL.to_json())
    record["added_tokens"] = []
    for name in names:
        record["model"]["vocab"][f"{name}!"] = record["model"]["vocab"].pop(name)
    return json.dumps(record)


@pytest.mark.parametrize(("name", "what"), [("<s>", "beginning"), ("</s>", "end-of-text")])
def test_a_tokenizer_without_bos_or_eos_is_refused_with_its_path(
    tmp_path: Path, name: str, what: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(_without(name))
    with pytest.raises(UserError, match=rf"tokenizer.json: .*no {what}"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [None, "{}", "no json", "\ud800"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_padding_and_truncation_set_in_a_file_are_ignored() -> None:
    record = json.loads(MODEL.to_json())
    record["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    record["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    loaded = Tokenizer.from_json(json.dumps(record))
    assert loaded.encode_batch([CODE, "cat"]) == MODEL.encode_batch([CODE, "cat"])


@pytest.mark.skipif(not MINICPM.exists(), reason="the shared MiniCPM4 tokenizer is not here")
def test_a_real_tokenizer_loads_with_mask_above_its_added_tokens() -> None:
    loaded = load_tokenizer(MINICPM)
    assert loaded.mask_id == 73_448  # the declared vocabulary ends at 73,440
    assert loaded.encode("The cat")[0] == 1507
    for text in ["<s> <|im_end|> <0x0A>", "  two\n\tlines", "\u65e5\u672c\U0001f600\0"]:
        assert loaded.decode(loaded.encode(text)) == text
        assert max(loaded.encode(text)) < 73_440
    allowed = loaded.emittable(73_760)
    assert not allowed[[0, loaded.bos_id, *range(73_440, 73_760)]].any()
    assert allowed[loaded.eos_id]
