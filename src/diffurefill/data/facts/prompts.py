"""What a model is asked to write: data, and the digest that names it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from diffurefill.data.facts.leads import Lead, excerpt
from diffurefill.runtime import philox

MAX_SOURCE_WORDS = 240
"""A longer lead is cut at a sentence's end: small models restate short passages best."""


class Style(NamedTuple):
    """`forms` are ways to put the task; a lead gets one of them, drawn by its id and the seed."""

    name: str
    system: str
    forms: tuple[str, ...]
    max_tokens: int
    temperature: float


_SYSTEM = (
    "You write plain, exact English. Your only knowledge is the source you are given: every name, "
    "number and date you write stands there, and you add nothing from memory. Reply with the text "
    "itself, without a heading, an opening remark or a comment."
)
_SOURCE = "\n\nSubject: {title}\n\nSource:\n{text}"
_OWN_WORDS = (
    " Put everything into words of your own: apart from names, never repeat more than six words "
    "in a row. Write numbers in digits and keep them exactly."
)

STYLES = {
    "restate": Style(
        "restate",
        _SYSTEM,
        (
            "Tell all facts of the source below in connected paragraphs of 60 to 250 words. "
            "Begin somewhere other than the source does and use another order."
            + _OWN_WORDS
            + _SOURCE,
            "Make questions and answers of the source below: a question on one line, on the next "
            "its answer as a whole sentence, until no fact is left over." + _OWN_WORDS + _SOURCE,
            "Explain the subject of the source below to someone who meets it for the first time: "
            "first what it is, then the rest, in short paragraphs, 60 to 250 words."
            + _OWN_WORDS
            + _SOURCE,
        ),
        max_tokens=700,
        temperature=0.8,
    ),
    "sentences": Style(
        "sentences",
        _SYSTEM,
        (
            "Write {num_sentences} sentences about the source below, each on a line of its own and "
            "each with another fact. Someone who sees only one of them must understand it, so each "
            "says the name of its subject in full, never a pronoun instead. No numbering."
            + _OWN_WORDS
            + _SOURCE,
        ),
        max_tokens=500,
        temperature=0.8,
    ),
}


def instructions(style: Style, num_sentences: int) -> tuple[str, ...]:
    """The style's words without any lead: what no answer may repeat."""
    blank = {"title": "", "text": "", "num_sentences": num_sentences}
    return (style.system, *(form.format(**blank) for form in style.forms))


def prompt_version(style: Style, num_sentences: int) -> str:
    """Changes whenever what is asked changes, so that old answers are never taken for new ones."""
    content = [style, instructions(style, num_sentences), MAX_SOURCE_WORDS]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def answer_key(lead: Lead, style: Style, seed: int, version: str) -> str:
    """Names one question: the same lead, style, seed and prompt are asked once."""
    return hashlib.sha256(json.dumps([lead.id, style.name, seed, version]).encode()).hexdigest()


def request_seed(key: str) -> int:
    """A sampling seed for the endpoint, 31 bits."""
    return int(philox("facts", key).integers(1 << 31))


def messages(style: Style, lead: Lead, key: str, num_sentences: int) -> list[dict[str, Any]]:
    """The chat that asks for `lead`."""
    form = style.forms[int(philox("form", key).integers(len(style.forms)))]
    text = excerpt(lead.text, MAX_SOURCE_WORDS)
    content = form.format(
        title=lead.title or "(see source)", text=text, num_sentences=num_sentences
    )
    return [{"role": "system", "content": style.system}, {"role": "user", "content": content}]
