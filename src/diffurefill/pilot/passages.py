"""Prompts and their real continuations: passages of text that no model has trained on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diffurefill.config import DataConfig, UserError
from diffurefill.data.documents import held_out_documents, open_corpus
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.runtime import philox

MAX_PER_DOCUMENT = 8
"""A long document gives no more: it would crowd out the others."""
POOL = 4096
"""Passages looked at: sources may end one after the other, and a prefix would be of some alone."""


@dataclass(frozen=True)
class Passage:
    """Token ids, without BOS and EOS."""

    prompt: list[int]
    real: list[int]
    """What the text itself goes on with."""


def held_out_passages(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    num_passages: int,
    prompt_tokens: int,
    num_tokens: int,
    skip: int = 0,
) -> list[Passage]:
    """Passages of the held-out text, each beginning with a line, in a fixed random order; `skip` of
    them left out (to tune on some and report others). UserError where there are too few."""
    texts, length = held_out_documents(open_corpus(data), data), prompt_tokens + num_tokens
    pool = list(itertools.islice(_all_passages(texts, tokenizer, prompt_tokens, length), POOL))
    wanted = skip + num_passages
    if len(pool) < wanted:
        raise UserError(
            f"the held-out text has {len(pool)} passages of {length} tokens, {wanted} are wanted: "
            "ask for fewer prompts, or train with a larger data.held_out_fraction"
        )
    order = philox("pilot", "passages").permutation(len(pool))
    return [pool[i] for i in order[skip:wanted]]


def _all_passages(
    texts: Iterable[str], tokenizer: Tokenizer, prompt_tokens: int, length: int
) -> Iterator[Passage]:
    for text in texts:
        for ids in itertools.islice(_cuts(text, tokenizer, length), MAX_PER_DOCUMENT):
            yield Passage(ids[:prompt_tokens], ids[prompt_tokens:length])


def _cuts(text: str, tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """Runs of whole lines, as few as make `length` tokens; what is left at the end is dropped."""
    lines: list[str] = []
    for line in text.split("\n"):
        if not lines and not line.strip():
            continue
        lines.append(line)
        ids = tokenizer.encode("\n".join(lines))
        if len(ids) >= length:
            yield ids
            lines = []
