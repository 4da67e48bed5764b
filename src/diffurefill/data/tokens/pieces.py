"""What the pieces of a tokenizer.json stand for: bytes of text, the word start, specials kept out.

A `record` is the parsed JSON of a tokenizer of the `tokenizers` library.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal

import numpy as np

from diffurefill.config import UserError

Record = dict[str, Any]
WordStart = Literal["never", "always", "unless_space"]
"""When a space is put before the text: `unless_space` means unless it begins with one."""

_SEQUENCES = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
}
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_lengths(record: Record, num_pieces: int, without_text: Collection[int]) -> np.ndarray:
    """int64 (num_pieces,): UTF-8 bytes of text that each id stands for, as it is decoded.

    0 for the ids in `without_text` and for ids that no piece has.
    """
    steps = list(_steps(record["decoder"]))
    kinds = {step["type"] for step in steps}
    replacements = [pair for step in steps for pair in _replacement(step)]
    lengths = np.zeros(num_pieces, dtype=np.int64)
    alphabet = _byte_alphabet() if "ByteLevel" in kinds else frozenset()
    for piece, piece_id in _all_pieces(record):
        if "ByteFallback" in kinds and _BYTE_PIECE.fullmatch(piece):
            lengths[piece_id] = 1
        elif alphabet.issuperset(piece) and alphabet:
            lengths[piece_id] = len(piece)
        else:
            for old, new in replacements:
                piece = piece.replace(old, new)
            lengths[piece_id] = len(piece.encode("utf-8", "surrogatepass"))
    lengths[list(without_text)] = 0
    return lengths


def word_start(record: Record) -> WordStart:
    if any(step["type"] == "Prepend" for step in _steps(record["normalizer"])):
        return "always"
    for step in _steps(record["pre_tokenizer"]):
        marks_first = step["type"] == "Metaspace" and step["prepend_scheme"] != "never"
        if marks_first or (step["type"] == "ByteLevel" and step["add_prefix_space"]):
            return "unless_space"
    return "never"


def without_word_start(record: Record) -> Record:
    """The same tokenizer, with no space put before a text nor taken off what is decoded."""
    inner = dict(record)
    for part, sequence in _SEQUENCES.items():
        kept = [dict(step) for step in _steps(record[part]) if not _is_word_start(step)]
        for step in kept:
            if step["type"] == "Metaspace":
                step["prepend_scheme"] = "never"
            elif step["type"] == "ByteLevel":
                step["add_prefix_space"] = False
        inner[part] = {"type": "Sequence", sequence: kept} if kept else None
    return inner


def keep_specials_out(record: Record, specials: Collection[str]) -> bool:
    """Change `record` so that no text can be read as a special or a byte piece.

    Special are the pieces in `specials` and those that the record calls so.

    A byte-fallback BPE may have merges that spell such a piece, and to a Unigram model every piece
    is a piece of text. Returns whether anything changed. Raises UserError for other kinds of model.
    """
    model = record.get("model") or {}
    kind = model.get("type")
    if kind not in ("BPE", "Unigram"):
        raise UserError(
            f"a {kind or 'nameless'} tokenizer does not keep a text as it is: use a BPE or a "
            "Unigram tokenizer"
        )
    added = record.get("added_tokens") or ()
    names = {*specials, *(token["content"] for token in added if token["special"])}
    unknown = model.get("unk_token") if kind == "BPE" else _unigram_unknown(model)
    names |= {unknown} - {None}
    return _drop_merges(model, names) if kind == "BPE" else _break_up(record, names)


def _drop_merges(model: Record, names: set[str]) -> bool:
    def is_hidden(piece: str) -> bool:
        return piece in names or bool(model.get("byte_fallback") and _BYTE_PIECE.fullmatch(piece))

    kept = [merge for merge in model["merges"] if not is_hidden(_joined(merge))]
    changed = len(kept) < len(model["merges"])
    model["merges"] = kept
    return changed


def _break_up(record: Record, names: set[str]) -> bool:
    """Where a text spells such a piece, its first character is encoded apart from the rest.

    A low score would not do: what a special competes with may be unknown characters, whose score
    the library derives from the lowest of all.
    """
    model = record["model"]
    pieces = sorted(piece for piece, _ in model["vocab"] if piece in names and len(piece) > 1)
    patterns = [f"{re.escape(piece[0])}(?={re.escape(piece[1:])})" for piece in pieces]
    if model.get("byte_fallback"):
        patterns.append("<(?=0x[0-9A-F]{2}>)")
    split = {
        "type": "Split",
        "pattern": {"Regex": "|".join(patterns)},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = list(_steps(record.get("pre_tokenizer")))
    if not patterns or split in steps:
        return False
    record["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, split]}
    return True


def _unigram_unknown(model: Record) -> str | None:
    return None if model.get("unk_id") is None else model["vocab"][model["unk_id"]][0]


def _joined(merge: str | list[str]) -> str:
    """Old files write a merge as one string with a space between its parts."""
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def _all_pieces(record: Record) -> Iterator[tuple[str, int]]:
    vocab = record["model"]["vocab"]
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:
        yield from ((piece, i) for i, (piece, _) in enumerate(vocab))
    yield from ((token["content"], token["id"]) for token in record["added_tokens"])


def _steps(part: Record | None) -> Iterator[Record]:
    """The steps of a normaliser, pre-tokeniser or decoder, sequences laid flat."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for sequence in _SEQUENCES.values():
        for step in part.get(sequence, ()):
            yield from _steps(step)


def _replacement(step: Record) -> Iterable[tuple[str, str]]:
    if step["type"] == "Metaspace":
        return [(step["replacement"], " ")]
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return [(step["pattern"]["String"], step["content"])]
    return []


def _is_word_start(step: Record) -> bool:
    return step["type"] == "Prepend" or (step["type"] == "Strip" and step.get("content") == " ")


def _byte_alphabet() -> frozenset[str]:
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())
