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

PROBES = "nats per masked token; drift: what local steps changed, merge gain: what averaging did"
SHOWN_GENERATIONS = 20
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


@dataclass(frozen=True)
class GenerationProbes:
    """Means over the workers that logged them; CE in nats per masked token."""

    held_out_ce: float
    """Of the generation's global."""
    drift: float | None
    """CE after the local steps that followed, minus `held_out_ce`."""
    merge_gain: float | None
    """`held_out_ce` minus the CE of the workers' own weights before they adopted it (adoption)."""


def probes_by_generation(store: Store) -> dict[int, GenerationProbes]:
    """What the workers measured around each merge, oldest generation first."""
    found: dict[int, dict[str, list[float]]] = {}
    for lane in store.lanes():
        worker = protocol.worker_of(lane)
        for record in read_log(store, worker) if worker is not None else []:
            for name in ("held_out_ce", "drift", "adoption"):
                if name in record:
                    found.setdefault(record["gen"], {}).setdefault(name, []).append(record[name])
    means = {g: {n: sum(v) / len(v) for n, v in by.items()} for g, by in found.items()}
    return {
        gen: GenerationProbes(mean["held_out_ce"], mean.get("drift"), mean.get("adoption"))
        for gen, mean in sorted(means.items())
        if "held_out_ce" in mean
    }


def status_tables(store: Store) -> list[Table]:
    """What `diffurefill status` prints: the workers, then the last generations."""
    state = latest_state(store)
    title = (
        f"generation {state.gen}, step {state.step}, {state.tokens:,} tokens "
        f"(run/epoch/generation: {state.round_id})"
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
    generations = Table(title="held-out CE by generation", caption=PROBES)
    for column in ("generation", "global", "drift", "merge gain"):
        generations.add_column(column, justify="right")
    for gen, probes in list(probes_by_generation(store).items())[-SHOWN_GENERATIONS:]:
        generations.add_row(
            str(gen),
            _number(probes.held_out_ce),
            _number(probes.drift, "+.3f"),
            _number(probes.merge_gain, "+.3f"),
        )
    rejected = [f"worker {r.worker}: {r.reason}" for r in state.rejected]
    if rejected:
        generations.caption = f"{PROBES}; rejected in this generation: {'; '.join(rejected)}"
    return [workers, generations]


def _number(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else format(value, spec)
