import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from diffurefill.config import UserError
from diffurefill.data.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.data.tokens.kinds import CODE, KINDS, MODEL, any_text, every_kind, tricky_text


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
    assert MODEL.decode([*MODEL.encode("a"), *half, *MODEL.encode("c")]) == "a\ufffdc"


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


@pytest.mark.parametrize("stated", [1, 5, -1, 3])
def test_an_added_token_is_refused_where_the_library_would_number_it_otherwise(
    tmp_path: Path, stated: int
) -> None:
    """`stated` counts from the vocabulary's end: behind a hole, or on a piece's own id."""
    path, n = tmp_path / "tokenizer.json", MODEL.num_pieces
    path.write_text(_with_added([n + stated]))
    with pytest.raises(
        UserError, match=rf"tokenizer.json: .*has id {n + stated}, .* as {n}: .*hole"
    ):
        load_tokenizer(path)
    if stated > 0:
        path.write_text(_with_added([*range(n, n + stated + 1)]))
        assert load_tokenizer(path).num_pieces == n + stated + 1


def _with_added(ids: list[int]) -> str:
    record = json.loads(MODEL.to_json())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    record["added_tokens"] += [{"id": i, "content": f"<unused{i}>", **flags} for i in ids]
    return json.dumps(record)


@pytest.mark.parametrize("content", [None, "{}", "no json", "\ud800"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", ["[]", "null", '{"phrases": "a b"}', '{"phrases": [1]}'])
def test_json_of_another_form_is_refused_in_plain_words(content: str) -> None:
    with pytest.raises(
        UserError, match=r"tokenizers library: it is no JSON object|no list of texts"
    ):
        Tokenizer.from_json(content)


@pytest.mark.parametrize("kind", ["word start unless a space", "byte level", "trained"])
@pytest.mark.parametrize("absent", ["added_tokens", "normalizer", "post_processor", "type"])
def test_a_file_of_an_older_writer_is_read_as_the_library_reads_it(kind: str, absent: str) -> None:
    record = json.loads(KINDS[kind].to_json())
    (record["model"] if absent == "type" else record).pop(absent)
    steps = [record["pre_tokenizer"], *(record["decoder"] or {}).get("decoders", ())]
    for step in [step for step in steps if step and step["type"] == "Metaspace"]:
        step["add_prefix_space"] = step.pop("prepend_scheme") != "never"
        del step["split"]
    loaded, text = Tokenizer.from_json(json.dumps(record)), "the cat sat"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.byte_ends(loaded.encode(text), text) is not None
    assert loaded.encode_inner(" cat") == loaded.encode("the cat")[-1:]


@pytest.mark.parametrize("absent", ["decoder", "pre_tokenizer"])
def test_a_file_may_lack_the_parts_that_the_library_does_without(absent: str) -> None:
    record = json.loads(MODEL.to_json())
    record.pop(absent, None)
    assert Tokenizer.from_json(json.dumps(record)).encode("the cat")


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


# --- documents ------------------------------------------------------------------------------------


@every_kind
def test_a_document_is_bos_its_text_and_eos_and_a_prompt_is_its_beginning(kind: str) -> None:
    tokenizer = KINDS[kind]
    text = "the cat sat"
    document = tokenizer.document(text)
    assert document == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    assert document == tokenizer.wrap(tokenizer.encode_batch([text])[0])
    assert document[:-1] == tokenizer.prompt(text)


@every_kind
def test_a_text_inside_a_document_is_encoded_as_there(kind: str) -> None:
    tokenizer = KINDS[kind]
    whole = tokenizer.encode("the cat sat on the mat")
    assert whole == tokenizer.encode("the cat sat") + tokenizer.encode_inner(" on the mat")
    assert tokenizer.decode_inner(tokenizer.encode_inner(" on the mat")) == " on the mat"
    assert tokenizer.encode_inner(" on") == tokenizer.encode("the on")[-1:]


def test_a_special_is_not_read_inside_a_document_either() -> None:
    for tokenizer in KINDS.values():
        ids = tokenizer.encode_inner("a<s></s><|endoftext|>")
        assert {tokenizer.bos_id, tokenizer.eos_id}.isdisjoint(ids)


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel"])
def test_a_tokenizer_that_does_not_keep_text_is_refused(tmp_path: Path, kind: str) -> None:
    vocab = {"<s>": 0, "</s>": 1, "[UNK]": 2}
    path = tmp_path / "tokenizer.json"
    Backend(getattr(models, kind)(vocab, unk_token="[UNK]")).save(str(path))
    with pytest.raises(UserError, match=f"{kind} tokenizer does not keep a text"):
        load_tokenizer(path)


def test_a_tokenizer_with_one_token_for_both_ends_gets_a_bos_of_its_own() -> None:
    tokenizer = KINDS["byte level"]
    assert tokenizer.eos_id == 0  # <|endoftext|>, the only special of the trained one
    assert tokenizer.bos_id == tokenizer.num_pieces - 1
    assert tokenizer.bos_id not in tokenizer.encode("<s> <|endoftext|>")
    assert tokenizer.decode(tokenizer.document("the cat")) == "the cat"
    again = Tokenizer.from_json(tokenizer.to_json())
    assert (again.bos_id, again.num_pieces) == (tokenizer.bos_id, tokenizer.num_pieces)


def test_merges_that_spell_a_special_are_left_out() -> None:
    record = json.loads(KINDS["word start always"].to_json())
    vocab = record["model"]["vocab"]
    vocab["<"], vocab["<s"] = len(vocab), len(vocab) + 1
    record["model"]["merges"] = [["<", "s"], ["<s", ">"], *record["model"]["merges"]]
    loaded = Tokenizer.from_json(json.dumps(record))
    assert vocab["<s"] in loaded.encode("a<s>")
    assert loaded.bos_id not in loaded.encode("a<s>")


def test_broken_bytes_leave_the_line_break_beside_them_alone() -> None:
    """The library alone would write every byte of the run as U+FFFD."""
    model = train_tokenizer(["ab " * 50], 300)
    line_break, half = model.encode("\n"), model.encode("é")[:1]
    assert len(line_break) == len(half) == 1  # byte pieces, both
    assert model.decode([*line_break, *half, *line_break]) == "\n\ufffd\n"
    assert model.decode([*model.encode("ab"), *half, *model.encode("é")]) == "ab\ufffdé"
