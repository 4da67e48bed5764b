"""The fleet as its pushed logs tell it. Reads the store only: no worker is ever asked anything.

Twice a reachability check declared a healthy fleet dead in the seed run; a pushed log cannot.
Imports no torch, so it answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diffurefill.fleet import records
from diffurefill.fleet.log import read_log
from diffurefill.fleet.records import State
from diffurefill.fleet.run import read_state
from diffurefill.store.base import MAIN, NoRun, Store

PROBES = "nats per masked token; drift: what local steps changed, merge gain: what averaging did"
SHOWN_GENERATIONS = 20
SHOWN_REFUSED = 4
FREE = "is over: the next `diffurefill merger` begins at once"
NO_EPOCH = "none yet: `diffurefill merger` begins the first"
COLUMNS = (
    "worker", "incar-\nnation", "phase", "gen", "step", "loss", "tokens\n/ s", "MFU", "log\nage"
)  # fmt: skip
"""Of the workers' table, in two lines where that lets it fit 80 columns."""
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


Logs = Mapping[int, Sequence[Mapping[str, Any]]]
"""The pushed log of each worker, oldest record first."""


def read_logs(store: Store) -> Logs:
    workers = [records.worker_of(lane) for lane in store.lanes()]
    return {worker: read_log(store, worker) for worker in workers if worker is not None}


def worker_statuses(logs: Logs, now: float) -> Iterator[WorkerStatus]:
    for worker, log in logs.items():
        if not log:
            continue
        facts: dict[str, Any] = {}
        for record in log:
            facts.update(record)
        last = log[-1]
        yield WorkerStatus(worker, last["incarnation"], last["phase"], now - last["time"], facts)


def latest_state(store: Store) -> State:
    version = store.head(MAIN)
    if version is None:
        raise NoRun(store.uri)
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


def probes_by_generation(logs: Logs) -> dict[int, GenerationProbes]:
    """What the workers measured around each merge, oldest generation first."""
    found: dict[int, dict[str, list[float]]] = {}
    for log in logs.values():
        for record in log:
            for name in ("held_out_ce", "drift", "adoption"):
                if record.get(name) is not None:
                    found.setdefault(record["gen"], {}).setdefault(name, []).append(record[name])
    means = {g: {n: sum(v) / len(v) for n, v in by.items()} for g, by in found.items()}
    return {
        gen: GenerationProbes(mean["held_out_ce"], mean.get("drift"), mean.get("adoption"))
        for gen, mean in sorted(means.items())
        if "held_out_ce" in mean
    }


def status_tables(store: Store) -> list[RenderableType]:
    """What `diffurefill status` prints: the alert, the run, the workers, the last generations."""
    state, logs = latest_state(store), read_logs(store)
    tables: list[RenderableType] = [_run(state), _workers(logs), _generations(logs)]
    if state.alert:
        alert = Panel(Text(state.alert), title="the merger stands still", border_style="bold red")
        tables.insert(0, alert)
    return tables


def _run(state: State) -> Table:
    """The newest state, a line for each thing that there is to say of it."""
    table = Table(title=f"run {state.run_id}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    origin = "" if state.restored_from is None else f", restores {state.restored_from}"
    table.add_row("generation", f"{state.gen}{origin}; step {state.step}, {state.tokens:,} tokens")
    holder = f"of merger {state.merger_id[:8]}, beat {state.beat}"
    epoch = f"{state.epoch} {holder if state.merger_id else FREE}"
    table.add_row("epoch", epoch if state.epoch else NO_EPOCH)
    table.add_row("waits for", _listed(state.live, "worker") or "nobody seen yet")
    averages = [
        f"{name} of {a.count}{'' if a.gen == state.gen else f' (up to {a.gen})'}"
        for name, a in (("EMA", state.ema), ("SWA", state.swa))
        if a is not None
    ]
    table.add_row("averages", ", ".join(averages) or "none yet")
    if state.guard_ce is not None:
        table.add_row("guard CE", f"{state.guard_ce:.3f} nats per masked token, mean of rows")
    if state.snapshots:
        table.add_row("snapshots", _listed([s.gen for s in state.snapshots], "generation"))
    if refused := list(refusals(state)):
        table.add_row("refused", "\n".join(refused[:SHOWN_REFUSED]))
    if state.compacted_gen:
        table.add_row("compacted", f"files of generations before {state.compacted_gen} may be gone")
    return table


def refusals(state: State) -> Iterator[str]:
    """Contributions refused of late with reasons: this generation's, then those that were the last
    of their workers."""
    told = set()
    for r in state.rejected:
        told.add((r.worker, r.incarnation, r.seq))
        yield f"worker {r.worker}, contribution {r.seq} to generation {r.base_gen}: {r.reason}"
    for worker, last in sorted(state.roster.items()):
        if last.reason is not None and (int(worker), last.incarnation, last.seq) not in told:
            yield f"worker {worker}, contribution {last.seq}, its last one: {last.reason}"


def _listed(numbers: Sequence[int], one: str) -> str:
    names = one if len(numbers) == 1 else f"{one}s"
    return f"{names} {', '.join(map(str, numbers))}" if numbers else ""


def _workers(logs: Logs) -> Table:
    workers = Table(title="workers, by the logs they pushed", caption=TIMES)
    for column in COLUMNS:
        justify = "left" if column == "phase" else "right"
        workers.add_column(column, justify=justify, overflow="fold")
    for w in worker_statuses(logs, time.time()):
        workers.add_row(
            str(w.worker), w.incarnation[:8], w.phase, str(w.last.get("gen", "-")),
            str(w.last.get("step", "-")), _number(w.last.get("loss", w.last.get("loss_mean"))),
            _number(w.last.get("tokens_per_second"), ",.0f"), _number(w.last.get("mfu_6nd"), ".1%"),
            age_text(w.age_seconds),
        )  # fmt: skip
    return workers


def age_text(seconds: float) -> str:
    """In the unit that leaves at most three digits, for less than three years."""
    size, unit = seconds, "s"
    for larger, factor in (("min", 60), ("h", 60), ("d", 24)):
        if size < 2 * factor:
            break
        size, unit = size / factor, larger
    return f"{size:,.0f} {unit}"


def _generations(logs: Logs) -> Table:
    generations = Table(title="held-out CE by generation", caption=PROBES)
    for column in ("generation", "global", "drift", "merge gain"):
        generations.add_column(column, justify="right")
    for gen, probes in list(probes_by_generation(logs).items())[-SHOWN_GENERATIONS:]:
        generations.add_row(
            str(gen),
            _number(probes.held_out_ce),
            _number(probes.drift, "+.3f"),
            _number(probes.merge_gain, "+.3f"),
        )
    return generations


def _number(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else format(value, spec)
