"""The table that `probe` prints: a model a row, its figures, and what differs from the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from diffurefill.evaluate.scores import Scores, differences
from diffurefill.evaluate.statistics import Interval

CAPTION = (
    "Below each figure: what it is above the first model's, with the 95% bootstrap interval over "
    "the same items; * where that leaves out 0."
)


def score_tables(scores: Sequence[Scores]) -> list[Table]:
    """One table of all models, and held-out CE by mask rate."""
    return [_models(scores), *_rates(scores)]


def _models(scores: Sequence[Scores]) -> Table:
    sets = list(dict.fromkeys(name for found in scores for name in found.sets))
    digests = {n: f.probe for found in scores for n, f in found.sets.items()}
    probes = ", ".join(f"{name} {digests[name]}" for name in sets)
    table = Table(
        title=f"CE in nats per masked token, decoding accuracy\nprobes: {probes}",
        caption=CAPTION if len(scores) > 1 else None,
        show_lines=len(scores) > 1,
    )
    table.add_column("model", overflow="fold")
    columns = {**dict.fromkeys(sets, ".4f"), "token": ".1%", "pair": ".1%"}
    headings = {"token": "decoding: token", "pair": "decoding: pair"}
    present = {name for found in scores for name in found.values()}
    for name in columns:
        if name in present:
            table.add_column(headings.get(name, name), justify="right")
    for found in scores:
        against = differences(found, scores[0]) if found is not scores[0] else {}
        cells = (
            _cell(found.values(), against, name, spec)
            for name, spec in columns.items()
            if name in present
        )
        table.add_row(found.model, *cells)
    return table


def _cell(
    values: Mapping[str, Sequence[float]], against: Mapping[str, Interval], name: str, spec: str
) -> str:
    if name not in values:
        return "-"
    lines = [format(sum(values[name]) / len(values[name]), spec)]
    if name in against:
        d = against[name]
        star = "" if 0.0 in d else " *"
        lines += [f"{d.mean:+{spec}}{star}", f"[{d.low:+{spec}}, {d.high:+{spec}}]"]
    return "\n".join(lines)


def _rates(scores: Sequence[Scores]) -> Iterable[Table]:
    """CE by mask rate, a table a set."""
    for name in dict.fromkeys(name for found in scores for name in found.sets):
        having = [found for found in scores if name in found.sets]
        table = Table(title=f"{name}: CE by mask rate")
        table.add_column("model", overflow="fold")
        for rate in having[0].sets[name].by_rate:
            table.add_column(f"{rate:g}", justify="right")
        for found in having:
            table.add_row(found.model, *(f"{ce:.4f}" for ce in found.sets[name].by_rate.values()))
        yield table
