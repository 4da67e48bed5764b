"""The report's table, on a terminal: a row a benchmark, a column a model or a pair of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from diffurefill.evaluate.harness.tasks import BENCHMARKS


def accuracy_table(models: Sequence[dict[str, Any]]) -> Table:
    """Accuracies in percent with their 95% intervals."""
    table = Table(title="zero-shot accuracy, % (95% interval)")
    for column in ("benchmark", "items", "chance"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for model in models:
        table.add_column(f"{model['name']}\n{model['scored_by']}", justify="right")
    for name, first in models[0]["tasks"].items():
        title = f"{BENCHMARKS[name].column} {first['split']}, {first['metric']}"
        chance = f"{100 * first['chance']:.0f}"
        cells = [_cell(model["tasks"][name]) for model in models]
        table.add_row(title, f"{first['num_items']:,}", chance, *cells)
    return table


def _cell(result: dict[str, Any]) -> str:
    low, high = (100 * result["interval"][key] for key in ("low", "high"))
    return f"{100 * result['value']:.1f} ({low:.1f}-{high:.1f})"


def pair_table(pairs: Sequence[dict[str, Any]]) -> Table:
    """Differences in points, first model minus second, on the same items."""
    table = Table(title="paired differences, points (95% interval), and McNemar's p")
    table.add_column("benchmark")
    for pair in pairs:
        table.add_column(f"{pair['a']}\n- {pair['b']}", justify="right")
    for name in pairs[0]["tasks"]:
        cells = [_difference(pair["tasks"][name]) for pair in pairs]
        table.add_row(BENCHMARKS[name].column, *cells)
    return table


def _difference(found: dict[str, Any]) -> str:
    low, mean, high = (100 * found["difference"][key] for key in ("low", "mean", "high"))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}) p {found['mcnemar']['p_value']:.2g}"
