"""`init`: a new run. Tokenizer, probe, first weights and configuration become generation 0."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from diffurefill import config as configs
from diffurefill.config import RunConfig, UserError
from diffurefill.data.documents import open_corpus, pin_sources
from diffurefill.data.mixture import require_every_slot
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.evaluate.probe_sets import build_probes, save_probes
from diffurefill.fleet import records
from diffurefill.fleet.alone import is_train_folder
from diffurefill.fleet.exported import is_exported
from diffurefill.fleet.records import State
from diffurefill.store.base import (
    MAIN,
    Change,
    Conflict,
    Store,
    dump_json,
    folder_of,
    open_store,
    publish_surely,
    require_free,
    require_no_run,
)
from diffurefill.train.checkpoint import save_weights, schema_digest
from diffurefill.train.loop import initial_weights, make_tokenizer


def create_run(
    uri: str, config: RunConfig, work: Path, report: Callable[[str], None] = print
) -> State:
    """Publish generation 0 of a new run at `uri`. Nothing that exists there is ever overwritten."""
    _require_no_model(uri)
    require_free(uri)  # before minutes are spent on the text
    config = replace(config, data=pin_sources(config.data))
    corpus = open_corpus(config.data)
    require_every_slot(corpus, config.data, config.seed)
    report(f"corpus: {corpus.num_units:,} units; tokenizer: {config.data.tokenizer}")
    tokenizer = make_tokenizer(config, corpus)
    probes = build_probes(config, corpus, tokenizer)
    store = open_store(uri, create=True)  # only now: unusable text leaves no folder behind
    require_no_run(store)
    store.selftest()
    work.mkdir(parents=True, exist_ok=True)
    weights, probe_path = work / "global.safetensors", work / "probe.safetensors"
    save_weights(weights, initial_weights(config))
    save_probes(probe_path, probes, tokenizer.vocabulary_digest)
    state = State(
        run_id=uuid.uuid4().hex[:12],
        config_sha=configs.digest(config),
        schema_sha=schema_digest(weights),
        corpus_sha=corpus.fingerprint,
        global_weights=store.stage(weights),
    )
    _publish(store, state, config, tokenizer, store.stage(probe_path))
    described = ", ".join(f"{n} of {len(p.ids)} rows ({p.digest})" for n, p in probes.items())
    report(
        f"run {state.run_id} at {uri}: probes {described}; "
        f"{tokenizer.num_pieces:,} pieces, weights of {state.global_weights.size / 1e6:.1f} MB"
    )
    return state


def _require_no_model(uri: str) -> None:
    """UserError for a folder whose model would hide a run that was made there."""
    folder = folder_of(uri)
    if folder is not None and (is_train_folder(folder) or is_exported(folder)):
        raise UserError(f"{folder} holds a model already: give the run a folder of its own")


def _publish(
    store: Store, state: State, config: RunConfig, tokenizer: Tokenizer, probe: Change
) -> None:
    changes: dict[str, Change] = {
        records.STATE: dump_json(records.to_json(state)),
        records.CONFIG: configs.dumps(config).encode(),
        records.TOKENIZER: tokenizer.to_json().encode(),
        records.PROBE: probe,
        records.GLOBAL: state.global_weights,
    }
    try:
        publish_surely(store, MAIN, changes, expect=None)
    except Conflict:
        raise UserError(f"another process made a run at {store.uri} just now: join it") from None
