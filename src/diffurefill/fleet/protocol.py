"""The fleet's records and rules as pure functions: no torch, no I/O, no clock.

`state.json` on lane `main` is the only authority on what was merged. It names the global weights
by sha256, so a contribution says which *bytes* it started from, and a re-published or rolled-back
global can never swallow work that was done on another one. Source: spec fleet.md 5.1-5.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from diffurefill.config import FleetConfig
from diffurefill.store.base import Ref

STATE = "state.json"
CONFIG = "config.toml"
TOKENIZER = "tokenizer.json"
PROBE = "probe.safetensors"
GLOBAL = "global_b.safetensors"
EMA = "global_ema.safetensors"

Cursor = Mapping[str, int]
"""Where a slot's reader stands, as JSON; the fleet compares cursors and never looks inside."""


def lane_of(worker: int) -> str:
    return f"w-{worker:02d}"


def worker_of(lane: str) -> int | None:
    """The worker's number, or None for a lane that is not a worker's."""
    prefix, _, number = lane.partition("-")
    return int(number) if prefix == "w" and number.isdigit() else None


def round_path(gen: int) -> str:
    return f"rounds/{gen:08d}.json"


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


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Who holds a worker's lane. Each process start is a new incarnation."""

    worker: int
    incarnation: str
    inherited: str | None = None
    """Whose contribution lay on the lane at registration: if nobody merged it, it still counts."""


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
    delta_norm: float
    loss_mean: float

    @property
    def identity(self) -> tuple[int, str, int]:
        """No two contributions of a run share it (spec fleet.md I4)."""
        return (self.worker, self.incarnation, self.seq)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    worker: int
    incarnation: str
    seq: int
    base_gen: int
    reason: str

    @property
    def identity(self) -> tuple[int, str, int]:
        return (self.worker, self.incarnation, self.seq)


@dataclass(frozen=True)
class Average:
    """A side average of the globals: EMA. `gen` is the last generation folded into it."""

    ref: Ref
    count: int
    gen: int


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
    epoch: int = 0
    merger_id: str = ""
    step: int = 0
    tokens: int = 0
    ema: Average | None = None
    accepted: tuple[Contribution, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    roster: Mapping[str, Decided] = field(default_factory=dict)
    cursors: Mapping[str, Cursor] = field(default_factory=dict)

    @property
    def round_id(self) -> str:
        """For people only; rules compare gen and sha256."""
        return f"{self.run_id}/{self.epoch}/{self.gen}"

    def cursor(self, slot: int) -> Cursor | None:
        """Where slot `slot` continues; None at its beginning."""
        return self.cursors.get(str(slot))


def to_json(record: Any) -> dict[str, Any]:
    """A record as plain JSON data."""
    return dataclasses.asdict(record)


def contribution_from_json(data: Mapping[str, Any]) -> Contribution:
    fields: dict[str, Any] = {**data, "payload": Ref.from_json(data["payload"])}
    return Contribution(**fields)


def registration_from_json(data: Mapping[str, Any]) -> Registration:
    return Registration(**data)


def state_from_json(data: Mapping[str, Any]) -> State:
    ema = data["ema"]
    fields: dict[str, Any] = {
        **data,
        "global_weights": Ref.from_json(data["global_weights"]),
        "ema": Average(Ref.from_json(ema["ref"]), ema["count"], ema["gen"]) if ema else None,
        "accepted": tuple(contribution_from_json(c) for c in data["accepted"]),
        "rejected": tuple(Rejected(**r) for r in data["rejected"]),
        "roster": {w: Decided(**d) for w, d in data["roster"].items()},
    }
    return State(**fields)


# --- which contributions count -------------------------------------------------------------------

Verdict = Literal[
    "eligible", "decided", "run", "config", "schema", "codec", "stale_base", "incarnation",
    "slot_cursor", "no_steps",
]  # fmt: skip


def judge(
    contribution: Contribution, state: State, registration: Registration, codec: str
) -> Verdict:
    """Whether `contribution`, found on its worker's lane, may enter the next global, or why not.

    `decided` means it was accepted or rejected before and is no news. Bytes (hash, finiteness) are
    checked by the merger after this, on the payload itself.
    """
    c, last = contribution, state.roster.get(str(contribution.worker))
    if last is not None and last.incarnation == c.incarnation and c.seq <= last.seq:
        return "decided"
    if c.run_id != state.run_id:
        return "run"
    if c.config_sha != state.config_sha:
        return "config"
    if c.schema_sha != state.schema_sha:
        return "schema"
    if c.codec != codec:
        return "codec"
    if c.base_gen != state.gen or c.base_sha256 != state.global_weights.sha256:
        return "stale_base"
    if c.incarnation not in (registration.incarnation, registration.inherited):
        return "incarnation"
    if c.cursor_start != state.cursor(c.worker):
        return "slot_cursor"
    if c.steps <= 0 or c.tokens <= 0:
        return "no_steps"
    return "eligible"


# --- when a round closes -------------------------------------------------------------------------


def num_needed(config: FleetConfig, num_live: int, *, recovering: bool) -> int:
    """Contributions without which the round stays open.

    `min_fresh`, but never more than there are live workers: N falls to 1 when one worker is left.
    A merger that has just started needs one: after the loss of a whole fleet, what dead workers
    had pushed is merged before any new worker is waited for (the report's rule ii).
    """
    return 1 if recovering else max(1, min(config.min_fresh, num_live))


def grace_opens(config: FleetConfig, num_eligible: int, needed: int) -> bool:
    """Whether the grace period for stragglers has begun."""
    return num_eligible >= (needed if config.grace_from == "nth" else 1)


def round_closes(
    config: FleetConfig, *, num_eligible: int, num_live: int, needed: int, grace_elapsed: float
) -> bool:
    """Whether to average now: enough contributions, and nobody left to wait for or grace over."""
    if num_eligible < needed:
        return False
    return num_eligible >= num_live or grace_elapsed >= config.grace_seconds


# --- what a publish makes of the state -----------------------------------------------------------


def summation_order(contributions: Sequence[Contribution]) -> list[Contribution]:
    """The one order in which payloads are summed, so that anyone can recompute the same bytes."""
    return sorted(contributions, key=lambda c: (c.worker, c.seq))


def claimed(state: State, merger_id: str) -> State:
    """The state under a new merger's term. Whoever holds an older epoch can publish no more."""
    return dataclasses.replace(state, epoch=state.epoch + 1, merger_id=merger_id)


def _decide(
    roster: Mapping[str, Decided], records: Sequence[Contribution | Rejected]
) -> dict[str, Decided]:
    def decided(r: Contribution | Rejected) -> Decided:
        reason = r.reason if isinstance(r, Rejected) else None
        return Decided(incarnation=r.incarnation, seq=r.seq, reason=reason)

    return {**roster, **{str(r.worker): decided(r) for r in records}}


def with_rejected(state: State, rejected: Sequence[Rejected]) -> State:
    """The same generation, more rejections on record: a waiting worker learns of them."""
    return dataclasses.replace(
        state,
        rejected=(*state.rejected, *rejected),
        roster=_decide(state.roster, rejected),
    )


def advanced(
    state: State,
    *,
    accepted: Sequence[Contribution],
    rejected: Sequence[Rejected],
    global_weights: Ref,
) -> State:
    """The next generation. Step, tokens and slot cursors move only with accepted contributions.

    The step grows by the longest interval merged (equal for all by construction). A slot's cursor
    rides with the weights: rows of a contribution that was not accepted are read again.
    """
    return dataclasses.replace(
        state,
        gen=state.gen + 1,
        parent_gen=state.gen,
        global_weights=global_weights,
        step=state.step + max(c.steps for c in accepted),
        tokens=state.tokens + sum(c.tokens for c in accepted),
        accepted=tuple(accepted),
        rejected=tuple(rejected),
        roster=_decide(state.roster, [*rejected, *accepted]),
        cursors={
            **state.cursors,
            **{str(c.worker): c.cursor_end for c in accepted if c.cursor_end is not None},
        },
    )


def ema_is_due(state: State) -> bool:
    """Whether this generation is missing from the EMA. Generation 0, untrained, never enters it."""
    return state.gen > (state.ema.gen if state.ema else 0)


def with_ema(state: State, ref: Ref) -> State:
    count = state.ema.count + 1 if state.ema else 1
    return dataclasses.replace(state, ema=Average(ref=ref, count=count, gen=state.gen))


def round_record(state: State, base: Ref) -> dict[str, Any]:
    """`rounds/<gen>.json`: what it takes to recompute generation `state.gen` from its inputs."""
    return {
        "gen": state.gen,
        "parent_gen": state.parent_gen,
        "epoch": state.epoch,
        "merger_id": state.merger_id,
        "base": base.to_json(),
        "global_weights": state.global_weights.to_json(),
        "step": state.step,
        "tokens": state.tokens,
        "accepted": [to_json(c) for c in state.accepted],
        "rejected": [to_json(r) for r in state.rejected],
    }
