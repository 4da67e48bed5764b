"""Which of a run's weights: EMA, SWA, global, or the mean of its last k globals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diffurefill.config import UserError
from diffurefill.fleet import records
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.folds import average_last
from diffurefill.fleet.protocol import is_untrained
from diffurefill.fleet.records import Average, State
from diffurefill.fleet.run import Run, Snapshot
from diffurefill.store.base import NotFound, Ref, read_json

PUBLISHED = ("global", "ema", "swa")
KINDS = "ema, global, swa, or last-3 for the mean of the last three globals"
_LAST = re.compile(r"last-([1-9]\d*)")


class NotThere(UserError):
    """Weights of a known kind that this run does not have, or not yet."""


@dataclass(frozen=True)
class Weights:
    """A file of weights on this disk, and which it is."""

    path: Path
    kind: str
    """ema, global, swa, last-k."""
    gens: tuple[int, ...]
    """The globals in it: all of a mean of the last k, else the newest one."""
    num_globals: int
    """How many globals it averages; 1 for a global itself."""


def weights_of(run: Run, now: Snapshot, kind: str | None) -> Weights:
    """The run's newest weights of the kind; None: the EMA, or the global before there is one.

    UserError for a kind that is not known, NotThere for one that this run does not have.
    """
    if kind is None:
        kind = "global" if now.state.ema is None else "ema"
    require_known(kind)
    last = _LAST.fullmatch(kind)
    if last is not None:
        return _mean_of_last(run, now, int(last[1]))
    if kind == "global":
        path = run.fetch_global(now, FileAverager().apply_update)
        return Weights(path, kind, (now.state.gen,), 1)
    if kind == "ema":
        return _average(run, now.state.ema, kind, "no EMA has been published yet")
    why = "no SWA is kept; fleet.swa_from_step says from which step on"
    return _average(run, now.state.swa, kind, why)


def require_known(kind: str) -> None:
    if kind not in PUBLISHED and not _LAST.fullmatch(kind):
        raise UserError(f"no weights {kind!r}: ask for {KINDS}")


def _average(run: Run, found: Average | None, kind: str, why_none: str) -> Weights:
    if found is None:
        raise NotThere(f"{run.store.uri}: {why_none}; ask for other weights ({KINDS})")
    return Weights(run.fetch(found.ref), kind, (found.gen,), found.count)


# --- the last globals ----------------------------------------------------------------------------


def _mean_of_last(run: Run, now: Snapshot, k: int) -> Weights:
    """The mean of the newest k globals whose weights are still in the store."""
    paths: dict[int, Path] = {}
    for gen, ref in globals_back(run, now):
        if len(paths) == k:
            break
        path = _kept(run, now, gen, ref)
        if path is not None:
            paths[gen] = path
    if len(paths) < k:
        raise NotThere(
            f"{run.store.uri}: of its globals {len(paths)} are kept "
            f"({', '.join(map(str, paths)) or 'none'}), last-{k} needs {k}; ask for fewer, and set "
            "fleet.snapshot_every in the next run"
        )
    dest = run.cache / f"last-{k}-{now.state.gen}.safetensors"
    average_last(list(paths.values()), dest)
    return Weights(dest, f"last-{k}", tuple(paths), k)


def globals_back(run: Run, now: Snapshot) -> Iterator[tuple[int, Ref]]:
    """(generation, global) from the newest back along the lineage, each weights once.

    What a rollback left behind is no ancestor; what it restored counts once. Untrained weights
    are left out. Ends early where a round's record is missing.
    """
    state, seen = now.state, set[str]()
    while not is_untrained(state):
        if state.global_weights.sha256 not in seen:
            seen.add(state.global_weights.sha256)
            yield state.gen, state.global_weights
        if not state.parent_gen:
            return
        try:
            record = read_json(run.store, now.version, records.round_path(state.parent_gen))
        except NotFound:
            return
        state = records.state_from_json(record["state"])


def _kept(run: Run, now: Snapshot, gen: int, ref: Ref) -> Path | None:
    try:
        if gen == now.state.gen:
            return run.fetch_global(now, FileAverager().apply_update)
        return run.fetch(ref)
    except NotFound:  # compacted away, or announced as an update only
        return None


def describe(weights: Weights, state: State) -> str:
    """One line for tables and messages."""
    name = f"{weights.kind}, generation {state.gen}"
    if weights.kind.startswith("last-"):
        return f"{name} (globals {', '.join(map(str, weights.gens))})"
    if weights.num_globals > 1:
        return f"{name} ({weights.num_globals} globals)"
    return name
