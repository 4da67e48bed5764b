"""The generated figures of "Memory" in docs/performance.md, from results/memory.json."""

from __future__ import annotations

from textwrap import fill
from typing import Any

WIDTH = 118
MIB = 2**20


def memory_block(facts: dict[str, Any]) -> str:
    kinds = [kind for kind, size in facts["cases"][0]["predicted"].items() if size]
    lines = [f"| rows at once | {' | '.join(kinds)} | predicted | measured | error |"]
    lines.append("| --- " * (len(kinds) + 4) + "|")
    for case in facts["cases"]:
        parts = [case["predicted"][kind] for kind in kinds]
        sizes = [*parts, case["predicted_bytes"], case["measured_bytes"]]
        cells = " | ".join(f"{size / MIB:,.0f}" for size in sizes)
        lines.append(f"| {case['rows']} | {cells} | {case['error']:+.1%} |")
    intro = (
        f"`{facts['command']}` (results/memory.json): {facts['preset']} with "
        f"{facts['optimizer']}, rows of {facts['row_length']}, on {facts['machine']['device']} in "
        f"{facts['precision']}, MiB at the moment when a step holds most; measured by what torch's "
        f"allocator was asked for. Largest error {facts['largest_error']:.1%}."
    )
    return "\n".join([fill(intro, WIDTH), "", *lines])
