"""A run in a store with a few published generations, made without training: seconds faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from diffurefill.config import RunConfig
from diffurefill.fleet import records
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.create import create_run
from diffurefill.fleet.records import Average, Fold, Saved, State
from diffurefill.store.base import MAIN, Change, Store, dump_json, open_store, read_json
from diffurefill.train.checkpoint import load_weights, save_weights
from tests.tiny import tiny_config, write_corpus

NUM_GENERATIONS = 4
SCALE = 0.05


def tiny_run(folder: Path, *, averages: bool = True, uri: str | None = None) -> str:
    """A run of `NUM_GENERATIONS` globals, each a random step from the one before; its address.

    With `averages` an EMA of all of them, an SWA of the last two and a snapshot of generation 2.
    """
    folder.mkdir(exist_ok=True)
    address = uri or str(folder / "run")
    state = create_run(address, run_config(folder), folder / "work", lambda line: None)
    store = open_store(address)
    weights = folder / "work" / "global.safetensors"
    for gen in range(1, NUM_GENERATIONS + 1):
        base, weights = weights, _stepped(weights, gen)
        state = _published(store, state, base, weights, averages)
    return address


def publish_another(folder: Path, gen: int) -> None:
    """Generation `gen`, the next one, of the run that `tiny_run` has made in `folder`."""
    store = open_store(str(folder / "run"))
    version = store.head(MAIN)
    assert version is not None
    state = records.state_from_json(read_json(store, version, records.STATE))
    base = folder / "work" / f"global-{gen - 1}.safetensors"
    _published(store, state, base, _stepped(base, gen), True)


def run_config(folder: Path) -> RunConfig:
    return tiny_config(write_corpus(folder))


def _stepped(weights: Path, gen: int) -> Path:
    generator = torch.Generator().manual_seed(gen)
    tensors = {
        name: t + SCALE * torch.randn(t.shape, generator=generator)
        for name, t in load_weights(weights).items()
    }
    dest = weights.with_name(f"global-{gen}.safetensors")
    save_weights(dest, tensors)
    return dest


def _published(store: Store, state: State, base: Path, weights: Path, averages: bool) -> State:
    gen = state.gen + 1
    ref = store.stage(weights)
    after = replace(
        state,
        gen=gen,
        parent_gen=state.gen,
        global_weights=ref,
        full_gen=gen,
        step=state.step + 4,
        tokens=state.tokens + 1024,
    )
    if averages:
        after = _with_averages(store, after, weights)
    changes: dict[str, Change] = {
        records.STATE: dump_json(records.to_json(after)),
        records.GLOBAL: ref,
        records.round_path(gen): dump_json(records.round_record(after, store.stage(base))),
    }
    sides = {records.EMA: after.ema, records.SWA: after.swa}
    changes |= {path: side.ref for path, side in sides.items() if side is not None}
    changes |= {records.snapshot_path(s.gen): s.ref for s in after.snapshots}
    store.publish(MAIN, changes, expect=store.head(MAIN))
    return after


def _with_averages(store: Store, state: State, weights: Path) -> State:
    ema = _folded(store, state.ema, weights, 0.5)
    swa = state.swa
    if state.gen > NUM_GENERATIONS - 2:
        count = 1 if swa is None else swa.count + 1
        swa = _folded(store, swa, weights, (count - 1) / count)
    snapshots = state.snapshots
    if state.gen == 2:
        snapshots = (Saved(2, state.global_weights),)
    moved = [side and replace(side, gen=state.gen) for side in (ema, swa)]
    return replace(state, ema=moved[0], swa=moved[1], snapshots=snapshots)


def _folded(store: Store, before: Average | None, weights: Path, keep: float) -> Average:
    dest = weights.with_name("side.safetensors")
    previous = None
    if before is not None:
        previous = store.fetch(before.ref, weights.with_name("previous.safetensors"))
    FileAverager().fold(weights, [Fold(previous, keep if previous else 0.0, dest)])
    return Average(store.stage(dest), 1 if before is None else before.count + 1, 0)
