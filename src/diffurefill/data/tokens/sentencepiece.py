"""A SentencePiece `tokenizer.model` as a backend of the `tokenizers` library.

The file is a protobuf message of which a dozen fields matter, so it is read here, field by field:
neither protobuf nor sentencepiece is needed. Read in one of two ways:

- as SentencePiece reads it: its own normalisation, user-defined pieces matched whole;
- where the tokenizer_config.json beside it names a Llama tokenizer, as that class reads it: a
  word-start U+2581 before the text and no other change, whatever the model says, and user-defined
  pieces are pieces like all others. MiniCPM is such a case: its model file asks for no word start.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from diffurefill.config import UserError

SPACE = "\u2581"
"""What stands for a space in a piece."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2
_TOKEN_FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")

Fields = dict[int, list[Any]]


@dataclass(frozen=True)
class SentencePieceModel:
    """What of a model file decides the ids. `pieces`, `scores` and `types` go by id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int
    byte_fallback: bool
    space_after: bool
    """U+2581 marks a word's end instead of its start."""
    charsmap: bytes
    word_start: bool
    trim_spaces: bool
    escape_spaces: bool


def load_backend(path: Path) -> Backend:
    """The model at `path` with the added tokens of added_tokens.json and tokenizer_config.json
    beside it; raises UserError where it cannot be followed exactly, OSError where it is not there.
    """
    model = parse_model(path.read_bytes())
    config = _read_json(path.with_name("tokenizer_config.json"))
    as_llama = config.get("tokenizer_class") in _LLAMA_CLASSES
    word_start = config.get("add_prefix_space") is not False if as_llama else model.word_start
    backend = build_backend(model, as_llama=as_llama, word_start=word_start)
    _add_tokens(backend, _read_json(path.with_name("added_tokens.json")), config)
    return backend


# --- the file ------------------------------------------------------------------------------------


def parse_model(data: bytes) -> SentencePieceModel:
    """Raises UserError where `data` is no SentencePiece model."""
    try:
        model = _fields(data)
        trainer = _fields(b"".join(model.get(2, [])))
        normalizer = _fields(b"".join(model.get(3, [])))
        entries = [_fields(entry) for entry in model[1]]
        return SentencePieceModel(
            pieces=[_last(entry, 1, b"").decode() for entry in entries],
            scores=[struct.unpack("<f", _last(entry, 2, bytes(4)))[0] for entry in entries],
            types=[_last(entry, 3, _NORMAL) for entry in entries],
            kind=_last(trainer, 3, _UNIGRAM),
            byte_fallback=bool(_last(trainer, 35, 0)),
            space_after=bool(_last(trainer, 24, 0)),
            charsmap=_last(normalizer, 2, b""),
            word_start=bool(_last(normalizer, 3, 1)),
            trim_spaces=bool(_last(normalizer, 4, 1)),
            escape_spaces=bool(_last(normalizer, 5, 1)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise UserError("not a SentencePiece model: fetch the file again") from None


def _fields(data: bytes) -> Fields:
    found: Fields = {}
    for number, value in _read_fields(data):
        found.setdefault(number, []).append(value)
    return found


def _last(fields: Fields, number: int, default: Any) -> Any:
    """A protobuf field that is given twice has its last value."""
    return fields.get(number, [default])[-1]


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) pairs: ints for varints, bytes for the rest; raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == 2:
            size, at = _varint(data, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + size > len(data):
            raise ValueError("the message ends inside a field")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("no varint")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} beside it cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path.name} beside it is no JSON object: fetch the file again")
    return content


# --- the backend ---------------------------------------------------------------------------------


def build_backend(model: SentencePieceModel, *, as_llama: bool, word_start: bool) -> Backend:
    """Pieces, merges or scores, normaliser and decoder; control pieces as special tokens.

    `Tokenizer.from_json` keeps these and the byte pieces out of what a text can be read as.
    """
    whole = [] if as_llama else _of_type(model, _USER_DEFINED)
    _require_followable(model, whole, word_start)
    backend = Backend(_bpe(model) if model.kind == _BPE else _unigram(model))
    normalizer: list[Any] = [] if as_llama else _own_normalizer(model)
    if word_start:
        normalizer.append(normalizers.Prepend(SPACE))
    normalizer.append(normalizers.Replace(" ", SPACE))
    if model.trim_spaces and not as_llama:
        normalizer.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    backend.normalizer = normalizers.Sequence(normalizer)
    decoder: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if word_start:
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoder)
    backend.add_special_tokens(
        [AddedToken(piece, normalized=False) for piece in _of_type(model, _UNKNOWN, _CONTROL)]
    )
    # Matched in the normalised text, where SentencePiece looks for them. Where two of them overlap,
    # the left one counts; a Unigram model of the original would weigh the two.
    backend.add_tokens([AddedToken(piece, normalized=True) for piece in whole])
    return backend


def _require_followable(model: SentencePieceModel, whole: list[str], word_start: bool) -> None:
    use_json = "use the tokenizer.json of the same model instead"
    if model.kind not in (_UNIGRAM, _BPE):
        raise UserError(f"it is neither a BPE nor a Unigram model: {use_json}")
    if len(set(model.pieces)) < len(model.pieces):
        raise UserError(f"it has the same piece twice: {use_json}")
    if len(_of_type(model, _UNKNOWN)) != 1:
        raise UserError(f"it has no unknown piece, or several: {use_json}")
    if model.byte_fallback and len(_of_type(model, _BYTE)) != 256:
        raise UserError(f"it falls back to bytes but lacks some of the 256 byte pieces: {use_json}")
    if _of_type(model, _UNUSED):
        raise UserError(f"it has pieces that are never to be used: {use_json}")
    if model.space_after or not model.escape_spaces:
        raise UserError(f"it does not mark a word's start by U+2581: {use_json}")
    if whole and word_start:
        # The library would put the word start before every stretch between two such pieces.
        raise UserError(f"it has user-defined pieces together with a word start: {use_json}")


def _of_type(model: SentencePieceModel, *types: int) -> list[str]:
    return [piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind in types]


def _own_normalizer(model: SentencePieceModel) -> list[Any]:
    steps: list[Any] = []
    if model.charsmap:
        try:
            steps.append(normalizers.Precompiled(model.charsmap))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"its table of character replacements is damaged: {error}") from None
    if model.trim_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def _bpe(model: SentencePieceModel) -> models.BPE:
    vocab = {piece: i for i, piece in enumerate(model.pieces)}
    return models.BPE(
        vocab=vocab,
        merges=_merges(model, vocab),
        unk_token=_of_type(model, _UNKNOWN)[0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _merges(model: SentencePieceModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score first.

    A SentencePiece BPE joins whichever neighbours make the piece of the best score, so that a piece
    has as many merges as splits. What ties goes by id, as in the converted files of the field.
    """
    ranked = []
    for piece, score in zip(model.pieces, model.scores, strict=True):
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[piece], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _unigram(model: SentencePieceModel) -> models.Unigram:
    scored = list(zip(model.pieces, model.scores, strict=True))
    return models.Unigram(scored, model.types.index(_UNKNOWN), model.byte_fallback)


def _add_tokens(backend: Backend, added: dict[str, Any], config: dict[str, Any]) -> None:
    """The tokens of added_tokens.json and of tokenizer_config.json, at the ids given there."""
    tokens: dict[int, AddedToken] = {}
    try:
        for content, token_id in added.items():
            tokens[int(token_id)] = AddedToken(content, special=True, normalized=False)
        for token_id, token in config.get("added_tokens_decoder", {}).items():
            flags = {name: bool(token.get(name)) for name in _TOKEN_FLAGS}
            tokens[int(token_id)] = AddedToken(token["content"], **flags)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            "the added tokens beside it cannot be read: fetch added_tokens.json and "
            "tokenizer_config.json again"
        ) from None
    for token_id in sorted(tokens):
        token = tokens[token_id]
        add = backend.add_special_tokens if token.special else backend.add_tokens
        add([token])
        if backend.token_to_id(token.content) != token_id:
            raise UserError(
                f"the added token {token.content!r} cannot have the id {token_id}: the ids of "
                "added tokens must follow the model's pieces without a gap"
            )
