"""The probes of a run: held-out text, its short starts, and sources of their own (wiki, code).

All lie in one file with the run, made once by `init` or `train`. A set is a `Probe` with a digest
of its own, so that each may be compared where it is the same. Source: spec algorithms 4.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diffurefill.config import HELD_OUT, SHORT, RunConfig, UserError
from diffurefill.data.cursors import Cursor
from diffurefill.data.documents import Corpus, held_out_documents, probe_source_documents
from diffurefill.data.open_rows import TokenDocument
from diffurefill.data.packing import Position, pack
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.evaluate.probes import DECODING, IDS, SEGMENTS, Probe, draw_masks, make_probe
from diffurefill.runtime import philox

SAMPLED_PIECES = 16
"""Pieces of documents that are read for every row of a probe."""

Probes = Mapping[str, Probe]
"""By the name of the set; `held_out` is always there and comes first."""


# --- making them ---------------------------------------------------------------------------------


def build_probes(config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Probe]:
    """Every probe that `config` asks for. Raises UserError where a source has too little text."""
    apart = config.probe.sets
    texts = held_out_documents(corpus, config.data, apart)
    pieces = sample_pieces(texts, config, tokenizer, HELD_OUT)
    probes = {HELD_OUT: packed_probe(pieces, config, tokenizer, HELD_OUT)}
    short = short_probe(pieces, config, tokenizer)
    if short is not None:
        probes[SHORT] = short
    for name in apart:
        pieces = sample_pieces(probe_source_documents(corpus, name), config, tokenizer, name)
        probes[name] = packed_probe(pieces, config, tokenizer, name)
    return probes


def build_probe(config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> Probe:
    """The held-out probe alone."""
    texts = held_out_documents(corpus, config.data, config.probe.sets)
    pieces = sample_pieces(texts, config, tokenizer, HELD_OUT)
    return packed_probe(pieces, config, tokenizer, HELD_OUT)


def sample_pieces(
    texts: Iterable[str], config: RunConfig, tokenizer: Tokenizer, name: str
) -> list[TokenDocument]:
    """The first pieces of the documents that come, in random order: with enough of them a few long
    documents do not make the whole probe. A piece is at most a row long."""
    pieces = (piece for text in texts for piece in _pieces(text, tokenizer, config.data.row_length))
    sample = list(itertools.islice(pieces, SAMPLED_PIECES * config.probe.num_rows))
    order = philox(config.seed, "probe", *_key(name), "pieces").permutation(len(sample))
    return [sample[i] for i in order]


def packed_probe(
    pieces: Sequence[TokenDocument], config: RunConfig, tokenizer: Tokenizer, name: str
) -> Probe:
    """`probe.num_rows` rows of whole pieces, packed as training packs them, with drawn masks."""
    # Whole rows without spans: what the probe asks stays the same when training's rows change.
    data = replace(config.data, packing="best_fit", short_rows=0.0, span_rows=0.0)
    rows = pack(
        pieces,
        Position(),
        data=data,
        seed=config.seed,
        slot=0,
        interval_rows=config.probe.num_rows,
        interval_steps=1,
        pad_id=tokenizer.pad_id,
    )
    chosen = list(itertools.islice(rows, config.probe.num_rows))
    empty = np.empty((0, data.row_length), dtype=np.int64)
    ids = np.concatenate([empty, *(row.ids for row in chosen)])
    doc_ids = np.concatenate([empty.astype(np.int32), *(row.doc_ids for row in chosen)])
    try:
        return make_probe(
            ids, doc_ids, config.probe, seed=config.seed, bos_id=tokenizer.bos_id, key=_key(name)
        )
    except UserError as error:
        raise UserError(f"probe {name}: {error}") from None


def short_probe(
    pieces: Sequence[TokenDocument], config: RunConfig, tokenizer: Tokenizer
) -> Probe | None:
    """The starts of the documents among `pieces`, one a row of `probe.short_length`: as many tokens
    as the held-out probe has, or as many rows as there are documents. None where rows are no longer
    than that anyway, and where no piece begins a document."""
    length = config.probe.short_length
    starts = [p.ids[:length] for p in pieces if p.ids[0] == tokenizer.bos_id]
    if config.data.row_length <= length or not starts:
        return None
    starts = starts[: config.probe.num_rows * config.data.row_length // length]
    ids = np.full((len(starts), length), tokenizer.pad_id, dtype=np.int64)
    doc_ids = np.full(ids.shape, -1, dtype=np.int32)
    for row, start in enumerate(starts):
        ids[row, : len(start)], doc_ids[row, : len(start)] = start, 0
    probe = draw_masks(
        ids, doc_ids, config.probe, seed=config.seed, bos_id=tokenizer.bos_id, key=_key(SHORT)
    )
    return _without_the_cut(probe, tokenizer.eos_id)


def _without_the_cut(probe: Probe, eos_id: int) -> Probe:
    """The last token of a start that was cut stays visible: hidden, it would be scored against the
    EOS that a model of whole documents expects there, and so would the end of a sentence before
    it."""
    goes_on = (probe.doc_ids[:, -1] >= 0) & (probe.ids[:, -1] != eos_id)

    def shown(mask: np.ndarray) -> np.ndarray:
        mask = mask.copy()
        mask[goes_on, -1] = False
        return mask

    masks = {rate: shown(mask) for rate, mask in probe.masks.items()}
    return replace(probe, masks=masks, decoding_mask=shown(probe.decoding_mask))


def _pieces(text: str, tokenizer: Tokenizer, row_length: int) -> Iterator[TokenDocument]:
    """The document cut to rows, each piece as a document of its own."""
    ids = np.array(tokenizer.document(text), dtype=np.int64)
    for at in range(0, len(ids), row_length):
        piece = ids[at : at + row_length]
        no_spans = partial(np.zeros, len(piece), np.int32)
        yield TokenDocument(piece, "held out", Cursor(), Cursor(), no_spans)


def _key(name: str) -> tuple[str, ...]:
    """What keys a set's draws. Held-out text has none: its probe was there before the others."""
    return () if name == HELD_OUT else (name,)


# --- on disk -------------------------------------------------------------------------------------


def save_probes(path: Path, probes: Probes, vocabulary: str) -> None:
    """`vocabulary`: digest of the tokenizer whose ids they hold (`Tokenizer.vocabulary_digest`).

    The held-out probe's arrays have bare names, as in files of the time before there were others.
    """
    arrays = {
        f"{_prefix(name)}{key}": np.ascontiguousarray(array)
        for name, probe in probes.items()
        for key, array in probe.arrays().items()
    }
    save_file(arrays, path, metadata={"vocabulary": vocabulary})


def load_probes(path: Path, vocabulary: str | None = None) -> dict[str, Probe]:
    """The probes of a file, held-out first. Raises UserError where it is no probe file, or was made
    for another vocabulary than `vocabulary`."""
    try:
        with safe_open(path, framework="numpy") as file:
            made_for = (file.metadata() or {}).get("vocabulary")
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: bf16, of a model's weights
        raise UserError(f"cannot read the probe file {path}: {error}") from None
    if vocabulary is not None and made_for is not None and made_for != vocabulary:
        raise UserError(
            f"the probe file {path} is of another vocabulary than the model's: take the one that "
            "lies with a run of this tokenizer"
        )
    names = sorted({key.rpartition("/")[0] for key in arrays})  # bare names: "", which comes first
    try:
        return {name or HELD_OUT: _probe(arrays, _prefix(name or HELD_OUT)) for name in names}
    except KeyError as error:
        raise UserError(
            f"{path} is not a probe file that this version reads: it has no {error}"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not a probe file that this version reads: {error}") from None


def _prefix(name: str) -> str:
    return "" if name == HELD_OUT else f"{name}/"


def _probe(arrays: Mapping[str, np.ndarray], prefix: str) -> Probe:
    """Raises KeyError for an array that is missing, ValueError for one that is of no probe."""
    head = f"{prefix}mask_"
    masks = {float(k[len(head) :]): v for k, v in sorted(arrays.items()) if k.startswith(head)}
    ids, doc_ids, decoding = (arrays[f"{prefix}{key}"] for key in (IDS, SEGMENTS, DECODING))
    kinds = [(ids, np.int64), (doc_ids, np.int32), *((m, np.bool_) for m in masks.values())]
    fit = all(
        a.shape == ids.shape and a.dtype == kind for a, kind in [*kinds, (decoding, np.bool_)]
    )
    if not fit or ids.ndim != 2 or not ids.size or ids.min() < 0:
        raise ValueError(
            f"its {prefix}arrays are not of one shape (rows, tokens) and of their kinds"
        )
    if not masks or not all(0 < rate <= 1 for rate in masks):
        raise ValueError(f"its {prefix}masks are not named by rates between 0 and 1")
    return Probe(ids, doc_ids, masks, decoding)
