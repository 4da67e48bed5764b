"""The demo's report, as Markdown and as one self-contained HTML page, from demo.json's facts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffurefill.chart import line_chart
from diffurefill.decode.view.page import Sample, fragment
from diffurefill.demo.writing import Written

PAGE_STYLE = (
    "body{font:16px/1.6 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
    "color:#111;background:#fff}table{border-collapse:collapse}"
    "td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:last-child,th:last-child{text-align:left}"
    "pre{background:#f6f6f6;padding:.8em;white-space:pre-wrap;overflow-wrap:anywhere}"
    "svg{max-width:100%;height:auto}h2{margin-top:2em}"
    ".dr .canvas{font-family:ui-monospace,monospace;font-size:14px}"
)


def write_reports(folder: Path, facts: dict[str, Any], written: Sequence[Written]) -> None:
    """`report.md` and `report.html` in `folder`."""
    (folder / "report.md").write_text(_markdown(facts, written), "utf-8")
    (folder / "report.html").write_text(_html(facts, written), "utf-8")


def generation_rows(facts: dict[str, Any]) -> list[list[str]]:
    """The table of generations, header first."""
    rows = [["generation", "workers", "step", "tokens", "held-out CE", "killed"]]
    for r in facts["table"]:
        workers = ", ".join(str(w) for w in r["workers"])
        ce = f"{r['held_out_ce']:.3f}"
        rows.append(
            [str(r["generation"]), workers, str(r["step"]), f"{r['tokens']:,}", ce, r["killed"]]
        )
    return rows


def text_rows(facts: dict[str, Any]) -> list[list[str]]:
    """The table of text statistics, header first."""
    rows = [["text", "own CE", "distinct-2", "doubled tokens"]]
    for name, r in facts["text"].items():
        shares = [f"{r['distinct_2']:.3f}", f"{r['doubled_share']:.1%}"]
        rows.append([name, f"{r['own_ce']:.2f}", *shares])
    return rows


def _summary(facts: dict[str, Any]) -> list[str]:
    """Sentences of the report; every figure is one of `facts`."""
    ema, last = facts["curves"]["ema"][-1][1], facts["held_out_ce_last"]
    better = "lower than" if ema < last else "higher than"
    checks = sum(facts["audit_checks"].values())
    return [
        f"{facts['parameters']:,} parameters, {facts['generations']} generations, "
        f"{facts['table'][-1]['tokens']:,} tokens, {facts['seconds']:.0f} seconds on "
        f"{facts['machine']['cpu_count']} cores.",
        f"Held-out cross entropy fell from {facts['held_out_ce_first']:.3f} to {last:.3f} nats per "
        f"masked token (mean over mask rates {', '.join(facts['held_out_by_rate'])}).",
        f"The EMA of the globals stands at {ema:.3f}, {better} the last global; the text below "
        f"was written with the {facts['weights_used']} weights.",
        f"Half of the held-out tokens hidden and filled greedily: "
        f"{facts['decoding_accuracy']['token']:.1%} right, and both of an adjacent pair "
        f"{facts['decoding_accuracy']['pair']:.1%}.",
        *(f"Killed with SIGKILL: {k['what']}." for k in facts["killed"]),
        f"Audit of the whole history: {facts['audit']} ({checks} checks).",
    ]


def _decoder(facts: dict[str, Any]) -> list[str]:
    told = []
    for stage in facts["decode"]:
        first, last = stage["temperature"]
        what = "refill" if stage["remask_fraction"] else "draft"
        told.append(
            f"{what}: {stage['num_passes']} passes, temperature {first:g} to {last:g}, "
            f"order noise {stage['order_noise']:g}, min-p {stage['min_p']:g}, commit gap "
            f"{stage['commit_gap']}, neighbour ban {stage['neighbour_ban']:g}"
            + (f", re-masks {stage['remask_fraction']:.0%}" if what == "refill" else "")
        )
    return told


CHOICE = (
    "The card's decoder is tuned for a far better model; for one this small the settings above "
    "were chosen by this table and by eye. Own CE is the model's own cross entropy of 15% of the "
    "tokens, hidden: lower than real text means that the text repeats what the model likes best. "
    "Distinct-2 is unique over all bigrams, doubled tokens are adjacent equal ids."
)


def _markdown(facts: dict[str, Any], written: Sequence[Written]) -> str:
    lines = ["# DiffuRefill demo", "", *(f"- {s}" for s in _summary(facts)), ""]
    lines += ["## How it decodes", "", *(f"- {s}" for s in _decoder(facts)), "", CHOICE, ""]
    lines += _markdown_table(text_rows(facts))
    for item in written:
        lines += ["", f"## {item.title}".replace("\n", " "), "", "Draft:", "", _fence(item.draft)]
        changed = f"After refill ({item.num_changed} tokens changed, "
        changed += f"{item.num_forward_passes} passes in all):"
        lines += ["", changed, "", _fence(item.text)]
    lines += ["", "## Every generation", "", *_markdown_table(generation_rows(facts))]
    return "\n".join([*lines, ""])


def _fence(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"


def _markdown_table(rows: list[list[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|{' --- |' * len(rows[0])}", *body]


def _html(facts: dict[str, Any], written: Sequence[Written]) -> str:
    marks = [(k["generation"], f"killed {k['kind']}") for k in facts["killed"]]
    chart = line_chart(
        facts["curves"], x_label="generation", y_label="held-out CE (nats)", marks=marks
    )
    items = "".join(f"<li>{html.escape(s)}</li>" for s in _summary(facts))
    decoder = "".join(f"<li>{html.escape(s)}</li>" for s in _decoder(facts))
    samples = "".join(
        f"<li>{html.escape(item.title)}: {item.num_changed} tokens changed by refilling, "
        f"{item.num_forward_passes} forward passes in all.</li>"
        for item in written
    )
    viewer = fragment([Sample(item.title, item.frames) for item in written])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>DiffuRefill demo</title>'
        f'<meta name="viewport" content="width=device-width"><style>{PAGE_STYLE}</style>'
        f"<h1>DiffuRefill demo</h1><ul>{items}</ul>{chart}"
        f"<h2>What it writes, pass by pass</h2><ul>{samples}</ul>{viewer}"
        f"<h2>How it decodes</h2><ul>{decoder}</ul><p>{html.escape(CHOICE)}</p>"
        f"{_html_table(text_rows(facts))}"
        f"<h2>Every generation</h2>{_html_table(generation_rows(facts))}</html>"
    )


def _html_table(rows: list[list[str]]) -> str:
    def line(row: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(r, "td") for r in rows[1:]) + "</table>"
