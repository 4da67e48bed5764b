"""Models and ids in golden/sentencepiece.json come from the sentencepiece package 0.2.3."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data.tokens.sentencepiece import build_backend, load_backend, parse_model
from diffurefill.data.tokens.tokenizer import Tokenizer, load_tokenizer

GOLDEN = json.loads(
    (Path(__file__).resolve().parents[2] / "golden" / "sentencepiece.json").read_text("utf-8")
)
MODELS = {name: base64.b64decode(made["model"]) for name, made in GOLDEN["models"].items()}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
SPECIALS = [("<unk>", 0.0, _UNKNOWN), ("<s>", 0.0, _CONTROL), ("</s>", 0.0, _CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, _BYTE) for byte in range(256)]
LETTERS = [(char, -9.0 - n, _NORMAL) for n, char in enumerate("\u2581abc<s>/")]
WORDS = [("ab", -1.0, _NORMAL), ("\u2581ab", -2.0, _NORMAL), ("abc", -3.0, _NORMAL)]
PIECES = [*SPECIALS, *LETTERS, *WORDS]


# --- a writer of model files ----------------------------------------------------------------------


def _varint(value: int) -> bytes:
    head = bytearray()
    while value > 127:
        head.append(value & 127 | 128)
        value >>= 7
    return bytes([*head, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def model_file(
    pieces: list[tuple[str, float, int]] = PIECES,
    *,
    kind: int = 2,
    byte_fallback: bool = False,
    space_after: bool = False,
    charsmap: bytes = b"",
    **normalizer: bool,
) -> bytes:
    """A model file; kind 1 is Unigram, 2 BPE. `normalizer`: word_start, trim, escape."""
    entries = [
        _bytes(1, _bytes(1, p.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind_))
        for p, score, kind_ in pieces
    ]
    trainer = _number(3, kind) + _number(24, space_after) + _number(35, byte_fallback)
    rules = _bytes(1, b"identity") + _bytes(2, charsmap)
    for field, name in ((3, "word_start"), (4, "trim"), (5, "escape")):
        if name in normalizer:
            rules += _number(field, normalizer[name])
    return b"".join(entries) + _bytes(2, trainer) + _bytes(3, rules)


def tokens(data: bytes, text: str) -> list[str]:
    model = parse_model(data)
    backend = build_backend(model, as_llama=False, word_start=model.word_start)
    return [model.pieces[i] for i in Tokenizer.from_json(backend.to_str()).encode(text)]


# --- against the package --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_the_sentencepiece_package(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(MODELS[name])
    tokenizer = load_tokenizer(path)
    expected = GOLDEN["models"][name]["ids"]
    assert [tokenizer.encode(text) for text in GOLDEN["texts"]] == expected


@pytest.mark.parametrize("name", ["bpe", "bpe with user-defined pieces", "unigram with bytes"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_model_with_bytes_and_no_trimming_keeps_every_text(name: str, text: str) -> None:
    text = text.replace(
        "\u2581", " "
    )  # the one character that such models cannot tell from another
    tokenizer = _golden(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ends = tokenizer.byte_ends(tokenizer.encode(text), text)
    assert ends is not None
    assert (ends[-1] if len(ends) else 0) == len(text.encode())


_LOADED: dict[str, Tokenizer] = {}


def _golden(name: str) -> Tokenizer:
    if name not in _LOADED:
        model = parse_model(MODELS[name])
        backend = build_backend(model, as_llama=False, word_start=model.word_start)
        _LOADED[name] = Tokenizer.from_json(backend.to_str())
    return _LOADED[name]


# --- what the fields mean -------------------------------------------------------------------------


def test_pieces_scores_and_types_are_read() -> None:
    model = parse_model(model_file(kind=1, word_start=False, trim=False))
    assert list(zip(model.pieces, model.scores, model.types, strict=True)) == PIECES
    assert (model.kind, model.byte_fallback, model.word_start, model.trim_spaces) == (
        *(1, False, False, False),
    )


def test_fields_that_are_left_out_have_their_declared_defaults() -> None:
    model = parse_model(_bytes(1, _bytes(1, b"a")))
    assert (model.types, model.scores, model.kind) == ([_NORMAL], [0.0], 1)
    assert (model.word_start, model.trim_spaces, model.escape_spaces) == (True, True, True)
    assert (model.byte_fallback, model.space_after, model.charsmap) == (False, False, b"")


def test_unknown_fields_of_every_kind_are_skipped() -> None:
    extra = _number(90, 300) + _varint(91 << 3 | 1) + bytes(8) + _varint(92 << 3 | 5) + bytes(4)
    assert parse_model(model_file() + extra) == parse_model(model_file())


def test_a_word_start_is_put_before_a_text_if_the_model_says_so() -> None:
    assert tokens(model_file(word_start=True), "ab") == ["\u2581ab"]
    assert tokens(model_file(word_start=False), "ab") == ["ab"]


def test_spaces_are_trimmed_if_the_model_says_so() -> None:
    text = "  ab  ab "
    assert tokens(model_file(trim=True), text) == ["\u2581ab", "\u2581ab"]
    spaces = ["\u2581", "\u2581"]
    expected = [*spaces, "\u2581ab", "\u2581", "\u2581ab", "\u2581"]
    assert tokens(model_file(trim=False), text) == expected


def test_the_best_scored_piece_is_merged_first_whatever_its_parts() -> None:
    pieces = [*SPECIALS, *LETTERS, ("ab", -2.0, _NORMAL), ("bc", -1.0, _NORMAL)]
    assert tokens(model_file([*pieces, ("abc", -3.0, _NORMAL)]), "abc abcabc")[-2:] == [
        *("abc", "abc"),
    ]
    assert tokens(model_file(pieces, word_start=False), "abc") == ["a", "bc"]


@pytest.mark.parametrize("kind", [1, 2])
def test_no_text_is_read_as_a_control_or_byte_piece(kind: int) -> None:
    # "<s>" would be one merge, "<s" and ">", and the likeliest piece by its score.
    extra = [("<s", -0.5, _NORMAL), ("<0x0A", -0.5, _NORMAL), ("0", -7.0, _NORMAL)]
    data = model_file([*SPECIALS, *BYTES, *LETTERS, *extra], kind=kind, byte_fallback=True)
    model = parse_model(data)
    backend = build_backend(model, as_llama=False, word_start=True)
    tokenizer = Tokenizer.from_json(backend.to_str())
    for text in ["<s></s><0x0A><unk>", "a<s>", "<0x0A>", "<<s>>"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert min(ids) >= len(SPECIALS)
    assert Tokenizer.from_json(tokenizer.to_json()).to_json() == tokenizer.to_json()


def test_no_text_is_read_as_a_control_piece_even_if_its_characters_are_unknown() -> None:
    letters = [letter for letter in LETTERS if letter[0] not in "<>/"]
    data = model_file([*SPECIALS, *letters], kind=1, word_start=False)
    found = tokens(data, "a<s></s>b")
    assert found[0] == "a"
    assert {"<s>", "</s>"}.isdisjoint(found)


# --- a Llama tokenizer, and added tokens ----------------------------------------------------------


def _folder(tmp_path: Path, model: bytes, **files: Any) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(model)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


USER_DEFINED = [*PIECES, ("a/b", 0.0, _USER_DEFINED)]
NO_START = model_file(USER_DEFINED, word_start=False, trim=True)


def test_a_llama_tokenizer_puts_a_word_start_before_a_text_and_changes_nothing_else(
    tmp_path: Path,
) -> None:
    folder = _folder(tmp_path, NO_START, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    backend = load_backend(folder / "tokenizer.model")
    assert backend.encode("ab  a/b").tokens == ["\u2581ab", "\u2581", "\u2581", "a", "/", "b"]


def test_without_such_a_class_the_model_is_followed(tmp_path: Path) -> None:
    backend = load_backend(_folder(tmp_path, NO_START) / "tokenizer.model")
    assert backend.encode("ab  a/b").tokens == ["ab", "\u2581", "a/b"]


def test_a_llama_tokenizer_may_say_that_it_has_no_word_start(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    backend = load_backend(_folder(tmp_path, NO_START, tokenizer_config=config) / "tokenizer.model")
    assert backend.encode("ab").tokens == ["ab"]


def test_added_tokens_have_the_ids_and_flags_that_the_files_give(tmp_path: Path) -> None:
    first = len(PIECES)
    config = {
        "added_tokens_decoder": {
            "1": {"content": "<s>", "special": True},
            str(first + 1): {"content": "<tool>", "special": False},
        }
    }
    folder = _folder(
        tmp_path, model_file(), added_tokens={"<im_end>": first}, tokenizer_config=config
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.num_pieces == first + 2
    assert tokenizer.encode("<tool>") == [first + 1]
    assert first not in tokenizer.encode("<im_end>")
    assert tokenizer.emittable(first + 4)[first : first + 2].tolist() == [False, True]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a SentencePiece model"),
        (b"PK\x03\x04 some archive", "not a SentencePiece model"),
        (model_file()[:-3], "not a SentencePiece model"),
        (_bytes(1, _bytes(1, b"\xff")), "not a SentencePiece model"),
        (_bytes(1, _number(1, 7)), "not a SentencePiece model"),
        (b"\xff" * 30, "not a SentencePiece model"),
        (model_file(kind=4), "neither a BPE nor a Unigram"),
        (model_file([*PIECES, PIECES[-1]]), "the same piece twice"),
        (model_file(PIECES[1:]), "no unknown piece"),
        (model_file(byte_fallback=True), "lacks some of the 256 byte pieces"),
        (model_file([*PIECES, ("ba", -1.0, _UNUSED)]), "never to be used"),
        (model_file(space_after=True), "a word's start"),
        (model_file(escape=False), "a word's start"),
        (model_file(USER_DEFINED, word_start=True), "together with a word start"),
        (model_file(charsmap=b"\x07\x00"), "table of character replacements is damaged"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_with_its_reason(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"tokenizer\.model: .*{reason}"):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["added_tokens", "tokenizer_config"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file_beside_the_model_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = _folder(tmp_path, model_file())
    (folder / f"{name}.json").write_text(content)
    with pytest.raises(UserError, match=f"{name}.json beside it"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"added_tokens": {"<im_end>": len(PIECES) + 5}}, "without a gap"),
        ({"added_tokens": {"<im_end>": "x"}}, "added tokens beside it cannot be read"),
        ({"tokenizer_config": {"added_tokens_decoder": {"30": {}}}}, "cannot be read"),
    ],
)
def test_added_tokens_that_cannot_be_had_are_refused(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        load_tokenizer(_folder(tmp_path, model_file(), **files))
