"""Documents of text as documents of tokens, with their spans on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import numpy as np

from diffurefill.config import DataConfig
from diffurefill.data.documents import Corpus, training_texts
from diffurefill.data.mixture import Document
from diffurefill.data.open_rows import TokenDocument
from diffurefill.data.spans.numbers import span_numbers
from diffurefill.data.spans.salient import find_spans
from diffurefill.data.tokens.tokenizer import Tokenizer

FindSpans = Callable[[str], list[tuple[int, int]]]
"""Text -> character ranges, sorted and disjoint."""

_ENCODE_DOCUMENTS, _ENCODE_CHARS = 64, 1_000_000
"""Documents encoded in one call: so many, or fewer that reach so many characters, for what a call
takes grows with them. Changes speed and memory, never a row."""
_SAMPLE_DOCUMENTS, _SAMPLE_CHARS = 1_000, 4_000_000
"""What a fast encoder must encode as the plain one does."""


def span_finder(data: DataConfig) -> FindSpans:
    """What `data.span_rule` asks for."""
    if data.span_rule == "collocations":
        from diffurefill.data.spans.collocations import Collocations

        return Collocations.load(data.collocations).find_spans
    return partial(find_spans, rule=data.span_rule)


def with_encoder(tokenizer: Tokenizer, data: DataConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer encoding as `data.encoder` says, checked on text of the run; UserError."""
    if data.encoder == "tokenizers":
        return tokenizer
    sample = islice(training_texts(corpus, data, _SAMPLE_CHARS), _SAMPLE_DOCUMENTS)
    return tokenizer.with_encoder(data.encoder, list(sample))


def encode_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    find: FindSpans,
    sources_with_spans: frozenset[str],
) -> Iterator[TokenDocument]:
    """In the order in which they come."""
    for chunk in _chunks(documents):
        encoded = tokenizer.encode_batch([document.text for document in chunk])
        for document, ids in zip(chunk, encoded, strict=True):
            look = find if document.source in sources_with_spans else _no_spans
            spans = partial(token_spans, document.text, ids, tokenizer, look)
            with_ends = np.array(tokenizer.wrap(ids), dtype=np.int64)
            yield TokenDocument(with_ends, document.source, document.before, document.after, spans)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    num_chars = 0
    for document in documents:
        chunk.append(document)
        num_chars += len(document.text)
        if len(chunk) == _ENCODE_DOCUMENTS or num_chars >= _ENCODE_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def token_spans(text: str, ids: list[int], tokenizer: Tokenizer, find: FindSpans) -> np.ndarray:
    """int32 (n + 2,): span numbers of BOS, `ids` and EOS; all 0 where the tokenizer changed the
    text, so that its tokens cannot be laid over it."""
    numbers = np.zeros(len(ids) + 2, dtype=np.int32)
    spans = find(text)
    ends = tokenizer.byte_ends(ids, text) if spans else None
    if ends is not None:
        numbers[1:-1] = span_numbers(text, ids, spans, ends)
    return numbers


def _no_spans(text: str) -> list[tuple[int, int]]:
    return []
