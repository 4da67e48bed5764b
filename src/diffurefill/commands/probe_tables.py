"""The tables that `probe` and `pick` print: a model a row, its figures, and what differs from the
first's. A table for each kind of figure, so that a terminal of 80 columns has room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from diffurefill.config import HELD_OUT
from diffurefill.evaluate.facts.probe import CHANCE
from diffurefill.evaluate.scores import Scores, differences, own_intervals
from diffurefill.evaluate.statistics import Interval

CAPTION = "Below each figure: its 95% bootstrap interval over rows or facts."
CAPTION_OF_SEVERAL = (
    "Below the first model's figures: their 95% bootstrap intervals over rows or facts. Below the "
    "others': what they are above the first's, item by item; * where the interval leaves out 0."
)

Columns = Mapping[str, tuple[str, str]]
"""By figure: heading and format."""
DECODING: Columns = {"token": ("token", ".1%"), "pair": ("pair", ".1%")}
FACTS: Columns = {
    "fact_choice": ("choice", ".1%"),
    "fact_nll": ("NLL", ".3f"),
    "fact_exact": ("exact", ".1%"),
    "fact_contained": ("contained", ".1%"),
}


def score_tables(scores: Sequence[Scores]) -> list[Table]:
    """All models on each kind of figure; held-out CE by mask rate; facts by relation."""
    intervals = [own_intervals(scores[0]), *(differences(found, scores[0]) for found in scores[1:])]
    probes = {name: f.probe for found in scores for name, f in found.sets.items()}
    versions = ", ".join(f"{name} {probe}" for name, probe in probes.items())
    kinds: dict[str, Columns] = {
        f"CE in nats per masked token\nprobes: {versions}": {n: (n, ".4f") for n in probes},
        "decoding accuracy": DECODING,
        "facts": FACTS,
    }
    present = {name for found in scores for name in found.values()}
    tables = []
    for title, columns in kinds.items():
        shown = {name: column for name, column in columns.items() if name in present}
        if shown:
            tables.append(_models(title, shown, scores, intervals))
    tables[-1].caption = CAPTION_OF_SEVERAL if len(scores) > 1 else CAPTION
    with_rates = [found for found in scores if HELD_OUT in found.sets]
    with_facts = [found for found in scores if found.facts is not None]
    tables += [_rates(with_rates)] if with_rates else []
    return tables + ([_relations(with_facts)] if with_facts else [])


def _models(
    title: str,
    columns: Columns,
    scores: Sequence[Scores],
    intervals: Sequence[Mapping[str, Interval]],
) -> Table:
    table = Table(title=title, show_lines=len(scores) > 1)
    table.add_column("model", overflow="fold")
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", overflow="fold")
    for i, found in enumerate(scores):
        values = found.values()
        cells = (
            _cell(values.get(name), intervals[i].get(name), spec, i == 0)
            for name, (_, spec) in columns.items()
        )
        table.add_row(found.model, *cells)
    return table


def _cell(
    values: Sequence[float] | None, interval: Interval | None, spec: str, is_first: bool
) -> str:
    """A figure, and below it its own interval or its difference from the first model's."""
    if values is None:
        return "-"
    lines = [format(sum(values) / len(values), spec)]
    if interval is not None and is_first:
        lines.append(f"[{interval.low:{spec}}, {interval.high:{spec}}]")
    elif interval is not None:
        star = "" if 0.0 in interval else " *"
        lines.append(f"{interval.mean:+{spec}}{star}")
        lines.append(f"[{interval.low:+{spec}}, {interval.high:+{spec}}]")
    return "\n".join(lines)


def _rates(scores: Sequence[Scores]) -> Table:
    """Held-out CE by mask rate."""
    table = Table(title=f"{HELD_OUT}: CE by mask rate")
    table.add_column("model", overflow="fold")
    for rate in scores[0].sets[HELD_OUT].by_rate:
        table.add_column(f"{rate:g}", justify="right")
    for found in scores:
        table.add_row(found.model, *(f"{ce:.4f}" for ce in found.sets[HELD_OUT].by_rate.values()))
    return table


def _relations(scores: Sequence[Scores]) -> Table:
    """Choice and NLL by relation."""
    found = [f.facts for f in scores if f.facts is not None]
    table = Table(
        title=f"facts {found[0].probe}: choice / nats per answer token",
        caption=f"choice by chance: {CHANCE:.0%}",
    )
    table.add_column("relation")
    table.add_column("facts", justify="right")
    for one in scores:
        table.add_column(one.model, justify="right", overflow="fold")
    by_relation = [facts.by_relation() for facts in found]
    for relation, about in by_relation[0].items():
        cells = (f"{by[relation]['choice']:.1%} / {by[relation]['nll']:.2f}" for by in by_relation)
        table.add_row(relation, f"{about['facts']:.0f}", *cells)
    return table
