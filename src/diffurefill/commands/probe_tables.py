"""The table that `probe` prints: a model a row, its figures, and what differs from the first."""

from __future__ import annotations

from collections.abc import Sequence

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

OTHERS = {
    "token": ("decoding: token", ".1%"),
    "pair": ("decoding: pair", ".1%"),
    "fact_choice": ("facts: choice", ".1%"),
    "fact_nll": ("facts: NLL", ".3f"),
    "fact_exact": ("facts: exact", ".1%"),
    "fact_contained": ("facts: contained", ".1%"),
}
"""Columns beside the probe sets: heading and format."""


def score_tables(scores: Sequence[Scores]) -> list[Table]:
    """One table of all models; held-out CE by mask rate; facts by relation."""
    tables = [_models(scores)]
    with_rates = [found for found in scores if HELD_OUT in found.sets]
    with_facts = [found for found in scores if found.facts is not None]
    tables += [_rates(with_rates)] if with_rates else []
    return tables + ([_relations(with_facts)] if with_facts else [])


def _models(scores: Sequence[Scores]) -> Table:
    sets = list(dict.fromkeys(name for found in scores for name in found.sets))
    digests = {n: f.probe for found in scores for n, f in found.sets.items()}
    probes = ", ".join(f"{name} {digests[name]}" for name in sets)
    table = Table(
        title=f"CE in nats per masked token, decoding accuracy\nprobes: {probes}",
        caption=CAPTION_OF_SEVERAL if len(scores) > 1 else CAPTION,
        show_lines=len(scores) > 1,
    )
    table.add_column("model", overflow="fold")
    columns = {**dict.fromkeys(sets, ".4f"), **{name: spec for name, (_, spec) in OTHERS.items()}}
    headings = {name: heading for name, (heading, _) in OTHERS.items()}
    present = {name for found in scores for name in found.values()}
    for name in columns:
        if name in present:
            table.add_column(headings.get(name, name), justify="right")
    for found in scores:
        is_first = found is scores[0]
        intervals = own_intervals(found) if is_first else differences(found, scores[0])
        values = found.values()
        cells = (
            _cell(values.get(name), intervals.get(name), spec, is_first)
            for name, spec in columns.items()
            if name in present
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
