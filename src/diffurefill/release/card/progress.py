"""The curve of a run: each published generation on the fixed probes, from the log of `probe
--follow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffurefill.chart import line_chart
from diffurefill.config import HELD_OUT, UserError
from diffurefill.release.card.tables import Rows

MAX_ROWS = 12


def curve(records: Sequence[dict[str, Any]]) -> str:
    """Held-out CE by generation as SVG, a line a kind of weights. UserError without any."""
    lines = {
        kind: [(float(r["gen"]), r["sets"][HELD_OUT]["mean"]) for r in of_kind]
        for kind, of_kind in _by_kind(records).items()
    }
    if not lines:
        raise UserError(
            f"the progress log has no figure of {HELD_OUT}: follow the run with it in --set, "
            "or leave the log out"
        )
    svg = line_chart(lines, x_label="generation", y_label="held-out CE, nats per masked token")
    return svg.replace("<svg ", '<svg style="background:#fff" ', 1)


def progress_rows(records: Sequence[dict[str, Any]]) -> Rows:
    """About a dozen generations, evenly spaced, the first and the last among them."""
    kinds = _by_kind(records)
    by_gen: dict[int, dict[str, dict[str, Any]]] = {}
    for kind, of_kind in kinds.items():
        for record in of_kind:
            by_gen.setdefault(record["gen"], {})[kind] = record
    gens = sorted(by_gen)
    last = len(gens) - 1
    shown = (
        sorted({round(i * last / max(MAX_ROWS - 1, 1)) for i in range(MAX_ROWS)}) if gens else []
    )
    rows = [["generation", "step", "tokens", *(f"held-out CE, {kind}" for kind in kinds)]]
    for i in shown:
        found = by_gen[gens[i]]
        about = found.get("global", {})
        cells = [f"{about[key]:,}" if key in about else "-" for key in ("step", "tokens")]
        ces = [f"{found[k]['sets'][HELD_OUT]['mean']:.4f}" if k in found else "-" for k in kinds]
        rows.append([str(gens[i]), *cells, *ces])
    return rows


def _by_kind(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records that have a held-out CE, in order; weights that were damaged have none."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: r["gen"]):
        if HELD_OUT in record.get("sets", {}):
            kinds.setdefault(record["weights"], []).append(record)
    return kinds
