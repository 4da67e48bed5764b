"""Write the figures in README.md from results/: `python docs/render.py`. A test holds them equal.

A number cannot be in the block between the markers unless a result file has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- demo:start -->", "<!-- demo:end -->"
SHOWN_ROWS = 8
WIDTH = 118


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text("utf-8")), "utf-8")


def rendered(text: str) -> str:
    """`text` with the block between the markers made anew from results/demo.json."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    facts = json.loads((ROOT / "results" / "demo.json").read_text("utf-8"))
    return f"{before}{START}\n{demo_block(facts)}\n{END}{after}"


def demo_block(facts: dict[str, Any]) -> str:
    machine, sample, infill = facts["machine"], facts["samples"][0], facts["samples"][-1]
    draft, refill = (stage["num_passes"] for stage in facts["decode"])
    intro = (
        f"`make demo` on {machine['cpu_count']} CPU cores, {facts['seconds']:.0f} seconds "
        f"(results/demo.json): {facts['parameters']:,} parameters, "
        f"{facts['table'][-1]['tokens']:,} tokens of the Python standard library."
    )
    outcome = (
        f"Held-out cross entropy {facts['held_out_ce_first']:.2f} -> "
        f"{facts['held_out_ce_last']:.2f} nats per masked token; audit of the whole history: "
        f"{facts['audit']} ({sum(facts['audit_checks'].values())} checks). A model this small "
        "writes text that looks like Python and means nothing. Left of each arrow the draft "
        f"({draft} passes), right of it the same text after refilling ({refill} more; "
        f"{sample['num_changed']} of its tokens changed):"
    )
    texts = [*beside(sample["draft"], sample["text"]), "", *beside(infill["draft"], infill["text"])]
    blocks = [fill(intro, WIDTH), fence(table(facts)), fill(outcome, WIDTH), fence(texts)]
    return "\n\n".join(blocks)


def fence(lines: list[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def table(facts: dict[str, Any]) -> list[str]:
    """Some generations, every one with a kill, and the last."""
    rows = facts["table"]
    step = max(1, len(rows) // SHOWN_ROWS)
    shown = [r for i, r in enumerate(rows) if i % step == 0 or r["killed"] or r is rows[-1]]
    lines = ["generation  workers      tokens  held-out CE  killed"]
    for r in shown:
        workers = ", ".join(str(w) for w in r["workers"])
        lines.append(
            f"{r['generation']:10d}  {workers:7}  {r['tokens']:10,}  {r['held_out_ce']:11.3f}  "
            f"{r['killed']}".rstrip()
        )
    return lines


def beside(left: str, right: str, width: int = 46) -> list[str]:
    """Two texts in two columns; long lines are cut."""
    a, b = left.rstrip().split("\n"), right.rstrip().split("\n")
    a += [""] * (len(b) - len(a))
    b += [""] * (len(a) - len(b))
    pairs = zip(a, b, strict=True)
    return [f"{x[: width - 1]:{width}} -> {y[: width - 1]}".rstrip() for x, y in pairs]


if __name__ == "__main__":
    main()
