"""The fleet as its pushed logs tell it. Reads the store only: no worker is ever asked anything.

Twice a reachability check declared a healthy fleet dead in the seed run; a pushed log cannot.
Imports no torch, so it answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from diffurefill.fleet import protocol
from diffurefill.fleet.log import read_log
from diffurefill.fleet.protocol import State
from diffurefill.fleet.run import read_state
from diffurefill.store.base import MAIN, NotFound, Store

TIMES = "age is by this machine's clock and is for people only; no rule of the fleet reads it"


@dataclass(frozen=True)
class WorkerStatus:
    """A worker by its last log lines."""

    worker: int
    incarnation: str
    phase: str
    age_seconds: float
    last: dict[str, Any]
    """The newest value of every fact in the log."""


def worker_statuses(store: Store, now: float) -> Iterator[WorkerStatus]:
    for lane in store.lanes():
        worker = protocol.worker_of(lane)
        log = read_log(store, worker) if worker is not None else []
        if worker is None or not log:
            continue
        facts: dict[str, Any] = {}
        for record in log:
            facts.update(record)
        last = log[-1]
        yield WorkerStatus(worker, last["incarnation"], last["phase"], now - last["time"], facts)


def latest_state(store: Store) -> State:
    version = store.head(MAIN)
    if version is None:
        raise NotFound(f"no run at {store.uri}")
    return read_state(store, version)


def held_out_by_generation(store: Store) -> dict[int, float]:
    """{generation: held-out CE of its global}, as the workers that adopted it measured it."""
    found: dict[int, float] = {}
    for lane in store.lanes():
        worker = protocol.worker_of(lane)
        for record in read_log(store, worker) if worker is not None else []:
            if record["phase"] == "adopt":
                found.setdefault(record["gen"], record["held_out_ce"])
    return dict(sorted(found.items()))


def status_tables(store: Store) -> list[Table]:
    """What `diffurefill status` prints: the workers, then the last generations."""
    state = latest_state(store)
    title = (
        f"run {state.run_id}: generation {state.gen}, step {state.step}, "
        f"{state.tokens:,} tokens, epoch {state.epoch}"
    )
    workers = Table(title=title, caption=TIMES)
    for column in ("worker", "incarnation", "phase", "gen", "step", "loss", "tokens/s", "log age"):
        workers.add_column(column, justify="left" if column == "phase" else "right")
    for w in worker_statuses(store, time.time()):
        workers.add_row(
            str(w.worker), w.incarnation[:8], w.phase, str(w.last.get("gen", "-")),
            str(w.last.get("step", "-")), _number(w.last.get("loss", w.last.get("loss_mean"))),
            _number(w.last.get("tokens_per_second"), ",.0f"), f"{w.age_seconds:,.0f} s",
        )  # fmt: skip
    generations = Table(title="held-out CE by generation")
    generations.add_column("generation", justify="right")
    generations.add_column("nats per masked token", justify="right")
    for gen, ce in list(held_out_by_generation(store).items())[-20:]:
        generations.add_row(str(gen), _number(ce))
    rejected = [f"worker {r.worker}: {r.reason}" for r in state.rejected]
    if rejected:
        generations.caption = "rejected in this generation: " + "; ".join(rejected)
    return [workers, generations]


def _number(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else format(value, spec)
