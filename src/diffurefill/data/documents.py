"""The corpus of a run: its sources, and which of their documents no worker may ever read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from diffurefill.config import DataConfig, Source, UserError
from diffurefill.data.formats.marks import Mark
from diffurefill.data.formats.rows import cut_long, read_rows
from diffurefill.data.sources import SourceText, open_source
from diffurefill.data.storage.files import pinned, read_whole
from diffurefill.runtime import philox


@dataclass(frozen=True)
class Corpus:
    """`probe_keys`: the keys (`text_key`) of the documents in probe sources. `span_list`: sha256 of
    the list of collocations, if there is one."""

    sources: Mapping[str, SourceText]
    probe_sources: tuple[SourceText, ...]
    probe_keys: frozenset[int]
    held_out_fraction: float
    span_list: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex over what the units are, not where: a worker refuses a corpus that differs."""
        texts = (*self.sources.values(), *self.probe_sources)
        facts = [self.span_list, *([text.name, text.facts] for text in texts)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def num_units(self) -> int:
        return sum(len(text.units) for text in self.sources.values())

    def is_held_out(self, text: str) -> bool:
        """Whether no worker may ever read this document: decided by its text alone.

        The one place that splits. Equal texts fall on the same side, whatever the source and
        however often they stand there.
        """
        key = text_key(text)
        return key < self.held_out_fraction * 2**64 or key in self.probe_keys


def text_key(text: str) -> int:
    """A 64-bit key of the text, blind to letter case and white space: a copy that was reflowed
    or lower-cased is still a copy."""
    plain = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.sha256(plain.encode("utf-8", "replace")).digest()[:8], "big")


def pin_sources(data: DataConfig) -> DataConfig:
    """`data` with every branch on a hub replaced by the commit that it points to now: a branch
    that moves would silently change what every cursor means."""

    def pin(source: Source) -> Source:
        return replace(source, paths=tuple(pinned(path) for path in source.paths))

    return replace(
        data,
        sources=tuple(map(pin, data.sources)),
        probe_sources=tuple(map(pin, data.probe_sources)),
    )


def open_corpus(data: DataConfig) -> Corpus:
    """The corpus that `data` names; raises UserError where a source is unreadable or empty.

    Sources that no phase draws from are not opened.
    """
    drawn = {name for phase in data.phases for name, share in phase.shares if share > 0}
    wanted = [s for s in data.sources if not data.phases or s.name in drawn]
    try:
        sources = {source.name: open_source(source, data.num_slots) for source in wanted}
        probe_sources = tuple(open_source(source, data.num_slots) for source in data.probe_sources)
        for text in (*sources.values(), *probe_sources):
            if next(texts_of(text), None) is None:
                raise UserError(
                    f"no text in the data source {text.name!r} ({', '.join(text.source.paths)}): "
                    "name paths that hold documents"
                )
        keys = frozenset(text_key(doc) for source in probe_sources for doc in texts_of(source))
    except OSError as error:
        raise UserError(f"cannot read a data source: {error}") from None
    span_list = ""
    if data.collocations:
        span_list = hashlib.sha256(read_whole(data.collocations)).hexdigest()
    return Corpus(sources, probe_sources, keys, data.held_out_fraction, span_list)


def documents_of_row(text: str | None) -> Iterator[str]:
    """The documents of one row: none where there is no text."""
    if text and not text.isspace():
        yield from cut_long(text)


def texts_of(source: SourceText, *key: int | str) -> Iterator[str]:
    """All documents of a source. With a `key` the units come in that random order: any start is
    a sample of the files."""
    order = philox(*key).permutation(len(source.units)) if key else range(len(source.units))
    for unit in order:
        for text, _ in read_rows(source.units[int(unit)], source.source.text_column, Mark()):
            yield from documents_of_row(text)


def held_out_documents(
    corpus: Corpus, data: DataConfig, apart: Collection[str] = ()
) -> Iterator[str]:
    """What the held-out probe reads, each text once: the probe sources except those named in
    `apart`, else the held-out share of the training sources, drawn by the first phase's shares.

    Raises UserError at the end where there was none.
    """
    own = [text for text in corpus.probe_sources if text.name not in apart]
    if own:
        shares = {text.name: (text, 1.0) for text in own}
    else:
        shares = {name: (corpus.sources[name], s) for name, s in data.phase_at(0).shares if s > 0}
    yield from _held_out(corpus, shares)


def probe_source_documents(corpus: Corpus, name: str) -> Iterator[str]:
    """The documents of one probe source, each text once. Raises UserError as above."""
    text = next(text for text in corpus.probe_sources if text.name == name)
    yield from _held_out(corpus, {name: (text, 1.0)})


def _held_out(corpus: Corpus, shares: Mapping[str, tuple[SourceText, float]]) -> Iterator[str]:
    seen: set[int] = set()
    for text in _interleaved(shares):
        key = text_key(text)
        if key not in seen and corpus.is_held_out(text):
            seen.add(key)
            yield text
    if not seen:
        raise UserError("no document is held out: raise data.held_out_fraction or add text")


def _interleaved(shares: Mapping[str, tuple[SourceText, float]]) -> Iterator[str]:
    """All documents of several sources, drawn by their shares until every one has ended."""
    rng = philox("held out", "draws")
    open_texts = {name: texts_of(text, "held out", name) for name, (text, _) in shares.items()}
    while open_texts:
        weights = np.array([shares[name][1] for name in open_texts])
        name = list(open_texts)[int(rng.choice(len(weights), p=weights / weights.sum()))]
        text = next(open_texts[name], None)
        if text is None:
            del open_texts[name]
        else:
            yield text


def training_texts(corpus: Corpus, data: DataConfig, max_chars: int) -> Iterator[str]:
    """A fixed sample of up to `max_chars` characters to train a tokenizer on, none held out.

    Sources count by their mean share over the phases. Within a source each unit gives at most an
    equal share of what is still wanted, so no unit crowds out the rest and only the start of a
    large one is read.
    """
    phases = [dict(phase.shares) for phase in data.phases] or [dict(data.phase_at(0).shares)]
    for name, source in corpus.sources.items():
        share = sum(phase.get(name, 0.0) for phase in phases) / len(phases)
        yield from _sample(corpus, source, int(share * max_chars))


def _sample(corpus: Corpus, source: SourceText, wanted: int) -> Iterator[str]:
    order = philox("training texts").permutation(len(source.units))
    for place, unit in enumerate(order):
        left = wanted // (len(order) - place)
        if left <= 0:
            continue
        for row, _ in read_rows(source.units[unit], source.source.text_column, Mark()):
            for text in documents_of_row(row):
                if left > 0 and not corpus.is_held_out(text):
                    yield text[:left]
                    wanted -= min(left, len(text))
                    left -= len(text)
            if left <= 0:
                break
