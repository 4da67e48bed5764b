"""What the fleet writes down: the records on every lane, as JSON and back. No torch, no clock.

`state.json` on lane `main` is the only authority on what was merged. It names the global weights
by sha256, so a contribution says which *bytes* it started from, and a re-published or rolled-back
global can never swallow work that was done on another one. Source: spec fleet.md 5.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from diffurefill.config import UserError
from diffurefill.store.base import Ref

R = TypeVar("R")

STATE = "state.json"
CONFIG = "config.toml"
TOKENIZER = "tokenizer.json"
PROBE = "probe.safetensors"
GLOBAL = "global_b.safetensors"
EMA = "global_ema.safetensors"
SWA = "swa.safetensors"
MOMENTUM = "outer.safetensors"
UPDATE = "update.safetensors"
ROUNDS = "rounds/"

Cursor = Mapping[str, Any]
"""Where a slot's reader stands, as JSON; the fleet compares cursors and never looks inside."""

Identity = tuple[int, str, int]
"""(worker, incarnation, seq): no two contributions of a run share it (spec fleet.md I4)."""


def lane_of(worker: int) -> str:
    return f"w-{worker:02d}"


def worker_of(lane: str) -> int | None:
    """The worker's number, or None for a lane that is not a worker's."""
    prefix, _, number = lane.partition("-")
    return int(number) if prefix == "w" and number.isdigit() else None


def round_path(gen: int) -> str:
    return f"{ROUNDS}{gen:08d}.json"


def snapshot_path(gen: int) -> str:
    return f"snap/{gen:08d}.safetensors"


@dataclass(frozen=True)
class WorkerPaths:
    """The files on a worker's own lane."""

    registration: str
    manifest: str
    payload: str
    log: str


def worker_paths(worker: int) -> WorkerPaths:
    n = f"w{worker:02d}"
    return WorkerPaths(f"reg_{n}.json", f"ckpt_{n}.json", f"ckpt_{n}.safetensors", f"log_{n}.jsonl")


# --- on a worker's lane --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Who holds a worker's lane. Each process start is a new incarnation."""

    worker: int
    incarnation: str
    inherited: str | None = None
    """Whose contribution lay on the lane at registration: if nobody merged it, it still counts."""
    compacted_gen: int = 0
    """Payloads made on generations before this one may be gone: the lane was compacted."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a worker says of the payload it pushed: `ckpt_wNN.json`."""

    run_id: str
    worker: int
    incarnation: str
    seq: int
    base_gen: int
    base_sha256: str
    config_sha: str
    schema_sha: str
    codec: str
    payload: Ref
    steps: int
    tokens: int
    cursor_start: Cursor | None
    cursor_end: Cursor | None
    moment_steps: int
    """Steps that the optimiser's moments had seen when the interval began: 0 after a start."""
    delta_norm: float
    loss_mean: float

    @property
    def identity(self) -> Identity:
        return (self.worker, self.incarnation, self.seq)


# --- on the main lane ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rejected:
    worker: int
    incarnation: str
    seq: int
    base_gen: int
    reason: str

    @property
    def identity(self) -> Identity:
        return (self.worker, self.incarnation, self.seq)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the merger measured of the accepted contribution at the same place in `accepted`."""

    norm: float
    """L2 of the decoded delta."""
    cosine: float
    """Between it and the sum of the round's others; 1 for a lone one."""


@dataclass(frozen=True)
class Average:
    """A side average of the globals: EMA, SWA. `gen` is the last generation folded into it."""

    ref: Ref
    count: int
    gen: int


@dataclass(frozen=True)
class Saved:
    """A file that belongs to one generation: a snapshot, or the outer step's momentum."""

    gen: int
    ref: Ref


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What became of a worker's last contribution."""

    incarnation: str
    seq: int
    reason: str | None = None
    """Why it was rejected; None when it was accepted."""


@dataclass(frozen=True, kw_only=True)
class State:
    """`state.json`. `gen` grows by one with every new global and is never reused."""

    run_id: str
    config_sha: str
    schema_sha: str
    """Digest of the weights' names, dtypes and shapes."""
    corpus_sha: str
    """Fingerprint of the text: cursors count documents, so every worker must have the same."""
    global_weights: Ref
    gen: int = 0
    parent_gen: int | None = None
    """The generation whose weights this one's contributions were added to."""
    restored_from: int | None = None
    """The generation whose weights a rollback published again as this one."""
    recent: tuple[Saved, ...] = ()
    """Globals before this one, newest first, that a late contribution may still start from."""
    epoch: int = 0
    merger_id: str = ""
    """Who holds the term; empty when it was given up, and anyone may claim at once."""
    beat: int = 0
    """Moves while a merger waits, so that others see it live."""
    live: tuple[int, ...] = ()
    """Workers that the merger waits for."""
    step: int = 0
    tokens: int = 0
    full_gen: int = 0
    """The newest generation whose whole global is in the store; behind `gen` only while a downlink
    update stands in for it."""
    update: Ref | None = None
    """The quantised step from `parent_gen`'s global to this one's (fleet.downlink = "update")."""
    momentum: Saved | None = None
    ema: Average | None = None
    swa: Average | None = None
    snapshots: tuple[Saved, ...] = ()
    accepted: tuple[Contribution, ...] = ()
    measured: tuple[Measured, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    looked: Mapping[str, str] = field(default_factory=dict)
    """{lane: nonce} of the workers' lanes as they were last read before this generation was made:
    whatever lay there was accepted or rejected."""
    norms: tuple[float, ...] = ()
    """Norms of the contributions accepted last, oldest first: what a usual one looks like."""
    guard_ce: float | None = None
    """Held-out CE of this global by the merger's guard: each row's over its masked tokens at all
    rates, then the mean of the rows; a probe's headline weighs the rates alike."""
    alert: str = ""
    """Why the merger stands still and what a person can do; empty when all is well."""
    compacted_gen: int = 0
    """Files of generations before this one may be gone."""
    roster: Mapping[str, Decided] = field(default_factory=dict)
    cursors: Mapping[str, Cursor] = field(default_factory=dict)

    @property
    def round_id(self) -> str:
        """For people only; rules compare gen and sha256."""
        return f"{self.run_id}/{self.epoch}/{self.gen}"

    def cursor(self, slot: int) -> Cursor | None:
        """Where slot `slot` continues; None at its beginning."""
        return self.cursors.get(str(slot))


def round_record(state: State, base: Ref) -> dict[str, Any]:
    """`rounds/<gen>.json`, kept for ever: what it takes to recompute generation `state.gen`, to
    check it and to return to it when older versions of the lane are gone."""
    return {"base": base.to_json(), "state": to_json(state)}


# --- JSON ----------------------------------------------------------------------------------------


def to_json(record: Any) -> dict[str, Any]:
    """A record as plain JSON data."""
    return dataclasses.asdict(record)


class OtherVersion(UserError, TypeError):
    """A record with other fields than ours. A TypeError too: who reads many lanes or versions
    passes over those of them that are not what we write."""


def contribution_from_json(data: Mapping[str, Any]) -> Contribution:
    """Like all of these: OtherVersion for other fields, KeyError or TypeError for nonsense."""
    return _parsed(Contribution, data, payload=Ref.from_json)


def registration_from_json(data: Mapping[str, Any]) -> Registration:
    return _parsed(Registration, data)


def state_from_json(data: Mapping[str, Any]) -> State:
    return _parsed(
        State,
        data,
        global_weights=Ref.from_json,
        recent=lambda saved: tuple(map(_saved, saved)),
        live=tuple,
        update=Ref.from_json,
        momentum=_saved,
        ema=_average,
        swa=_average,
        snapshots=lambda saved: tuple(map(_saved, saved)),
        accepted=lambda found: tuple(map(contribution_from_json, found)),
        measured=lambda found: tuple(_parsed(Measured, m) for m in found),
        rejected=lambda found: tuple(_parsed(Rejected, r) for r in found),
        norms=tuple,
        roster=lambda found: {w: _parsed(Decided, d) for w, d in found.items()},
    )


def _saved(data: Mapping[str, Any]) -> Saved:
    return _parsed(Saved, data, ref=Ref.from_json)


def _average(data: Mapping[str, Any]) -> Average:
    return _parsed(Average, data, ref=Ref.from_json)


def _parsed(kind: type[R], data: Mapping[str, Any], **parsers: Callable[[Any], Any]) -> R:
    """A record from its JSON; `parsers` by field, for those that are not null.

    A field with a default may be missing: an older version did not know it, and its runs go on.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"a {kind.__name__} is a JSON object, not {data!r:.40}")
    fields = dataclasses.fields(cast(Any, kind))
    ours, nothing = {f.name for f in fields}, dataclasses.MISSING
    needed = {f.name for f in fields if f.default is f.default_factory is nothing}
    for name in sorted((data.keys() - ours) | (needed - data.keys())):
        raise OtherVersion(
            f"this run's {kind.__name__.lower()} was written by another version of diffurefill "
            f"(it {'lacks' if name in ours else 'has'} the field {name!r}): use that one"
        )
    read = {n: parsers[n](v) if n in parsers and v is not None else v for n, v in data.items()}
    return kind(**read)


# --- between the merger and its arithmetic -------------------------------------------------------


@dataclass(frozen=True)
class Payload:
    """A contribution's bytes on this disk, and their weight in the mean."""

    path: Path
    codec: str
    weight: float


@dataclass(frozen=True)
class Inspection:
    """What a payload's bytes say of themselves."""

    fault: str | None
    """`schema` or `nonfinite`; None when it may be merged."""
    norm: float
    """L2 of the decoded delta; infinity where it cannot be computed."""


@dataclass(frozen=True)
class Fold:
    """A side average to be moved on: dest = keep * previous + (1 - keep) * new.

    EMA: keep is the decay. SWA of n globals: keep is (n - 1) / n. Without a previous one the
    average starts as the new weights themselves.
    """

    previous: Path | None
    keep: float
    dest: Path
