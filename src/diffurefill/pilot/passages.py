"""Prompts and their real continuations: passages of text that no model has trained on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diffurefill.config import DataConfig, UserError
from diffurefill.data.documents import held_out_documents, open_corpus
from diffurefill.data.tokens.tokenizer import Tokenizer

MAX_PER_DOCUMENT = 8
"""A long document gives no more: it would crowd out the others."""


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
    """The first passages of the held-out text, each beginning with a line, `skip` of them left
    out (to tune on one set and report another). UserError where there are too few."""
    found = _all_passages(held_out_documents(open_corpus(data), data), tokenizer, prompt_tokens,
                          prompt_tokens + num_tokens)  # fmt: skip
    chosen = list(itertools.islice(found, skip, skip + num_passages))
    if len(chosen) < num_passages:
        raise UserError(
            f"the held-out text has {skip + len(chosen)} passages of {prompt_tokens + num_tokens} "
            f"tokens, {skip + num_passages} are wanted: ask for fewer prompts, or train with a "
            "larger data.held_out_fraction"
        )
    return chosen


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
