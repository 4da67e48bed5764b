"""Rows as a person sees them: documents in colours, masked tokens reversed, spans underlined."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from diffurefill.data.packing import Rows
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.objective.corruption import Corrupted

DOCUMENT_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "white")
EDGE = "┃"


def show_rows(rows: Rows, corrupted: Corrupted, tokenizer: Tokenizer) -> Group:
    """One panel a row, with its rates of masking and what it holds."""
    legend = Text.assemble(
        "colour: document   ",
        ("reversed", "reverse"),
        ": masked   ",
        ("underlined", "underline"),
        ": a span, masked whole or not at all   ",
        (EDGE, "bold red"),
        ": edge of a short row's part",
    )
    panels = [_panel(rows, corrupted, row, tokenizer) for row in range(len(rows.ids))]
    return Group(legend, *panels)


def _panel(rows: Rows, corrupted: Corrupted, row: int, tokenizer: Tokenizer) -> Panel:
    rates = corrupted.t[corrupted.parts[row].unique()].tolist()
    doc_ids, spans = rows.doc_ids[row], rows.span_ids[row]
    num_padding = int((doc_ids < 0).sum())
    title = (
        f"row {row}: {doc_ids.max() + 1} documents, {spans.max()} spans, {num_padding} padding, "
        f"t {', '.join(f'{t:.2f}' for t in rates)}"
    )
    return Panel(_text(rows, corrupted, row, tokenizer), title=title, title_align="left")


def _text(rows: Rows, corrupted: Corrupted, row: int, tokenizer: Tokenizer) -> Text:
    ids, doc_ids, spans = rows.ids[row], rows.doc_ids[row], rows.span_ids[row]
    is_masked, length = corrupted.is_masked[row].numpy(), int(rows.part_lengths[row])
    shown = Text()
    for at, piece in enumerate(token_texts(ids[doc_ids >= 0], tokenizer)):
        if at and at % length == 0:
            shown.append(EDGE, "bold red")
        colour = DOCUMENT_COLOURS[int(doc_ids[at]) % len(DOCUMENT_COLOURS)]
        style = Style(color=colour, reverse=bool(is_masked[at]), underline=bool(spans[at]))
        shown.append(piece.replace("\n", "⏎\n"), style)
    return shown


def token_texts(ids: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    """What each token stands for; ⟨s⟩ and ⟨/s⟩ for BOS and EOS.

    A character that several tokens make up stands with the first of them, the others are empty.
    """
    specials = {tokenizer.bos_id: "⟨s⟩", tokenizer.eos_id: "⟨/s⟩"}
    inner: list[int] = []
    for token in map(int, ids):
        if token in specials:
            yield from _inner_texts(inner, tokenizer)
            inner = []
            yield specials[token]
        else:
            inner.append(token)
    yield from _inner_texts(inner, tokenizer)


def _inner_texts(ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """By byte lengths where they add up to the text, else each token decoded by itself."""
    text = tokenizer.decode_inner(ids).encode()
    ends = np.cumsum(tokenizer.byte_lengths[ids], dtype=np.int64).tolist()
    if ids and ends[-1] != len(text):
        yield from (tokenizer.decode_inner([token]) for token in ids)
        return
    start = 0
    for end in ends:
        while end < len(text) and text[end] & 0xC0 == 0x80:  # inside a character
            end += 1
        yield text[start : max(end, start)].decode("utf-8", "replace")
        start = max(end, start)
