"""Write the figures in README.md and docs/ from results/: `python docs/render.py`.

A number cannot be in a block between two markers unless a result file has it; a test holds them
equal.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from chaos_table import chaos_block
from data_blocks import lineage_block, pipeline_block, reader_block, resume_block
from evaluation_blocks import behind_block, evaluate_block, likelihood_block, probes_block
from memory_block import memory_block
from pilot_block import decode_block, doubled_block, knobs_block, pilot_block, speed_block
from train_block import (
    allocator_block,
    attention_block,
    optimizer_block,
    precision_block,
    train_block,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/fleet.md",
    "docs/data.md",
    "docs/performance.md",
    "docs/decoding.md",
    "docs/evaluation.md",
)
SHOWN_ROWS = 8
WIDTH = 118


def main() -> None:
    for name in PAGES:
        page = ROOT / name
        page.write_text(rendered(page.read_text("utf-8")), "utf-8")


def rendered(text: str) -> str:
    """`text` with every block between markers made anew from the result file of its name."""

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        facts = json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))
        return f"<!-- {name}:start -->\n{BLOCKS[name](facts)}\n<!-- {name}:end -->"

    marked = r"<!-- (?P<name>\w+):start -->\n.*?<!-- (?P=name):end -->"
    return re.sub(marked, block, text, flags=re.DOTALL)


# --- demo ----------------------------------------------------------------------------------------


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


# --- the fleet -----------------------------------------------------------------------------------


def kills_block(facts: dict[str, Any]) -> str:
    lines = [
        "| store | runs | passed | kills | pauses | second starts | total losses | generations |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for store in dict.fromkeys(run["store"] for run in facts["each"]):
        runs = [run for run in facts["each"] if run["store"] == store]
        passed = sum(run["passed"] for run in runs)
        names = ("kills", "pauses", "twins", "fleet losses", "generations")
        sums = (str(sum(run.get(name, 0) for run in runs)) for name in names)
        lines.append(f"| {store} | {len(runs)} | {passed} | {' | '.join(sums)} |")
    seconds = facts["seconds_of_chaos"]
    intro = (
        f"`{facts['command']}` on {facts['machine']['cpu_count']} CPU cores, {seconds:.0f} seconds "
        "of chaos a run (results/kills.json); `hf` is the test hub through the real client:"
    )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def capacity_block(facts: dict[str, Any]) -> str:
    """From the report's waiting to the least, a change at a time."""
    setting = facts["setting"]
    lines = ["| setting | waiting | rounds/h | tokens a day | GB up/down an hour |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for label, share in facts["waiting_share_path"].items():
        row = next(r for r in facts["rows"] if r["label"] == label)
        lines.append(
            f"| {label} | {share:.1%} | {row['rounds_per_hour']:.2f} | "
            f"{row['tokens_per_day'] / 1e9:.2f} B | {row['up_bytes_per_hour'] / 1e9:.0f} / "
            f"{row['down_bytes_per_hour'] / 1e9:.0f} |"
        )
    rates = [setting[f"{name}_bytes_per_second"] / 1e6 for name in ("upload", "merger")]
    intro = (
        f"`{facts['command']}` (results/capacity.json): {setting['workers']} workers with "
        f"{rates[0]:.0f} MB/s each and a merger with {rates[1]:.0f} MB/s, "
        f"{setting['params'] / 1e9:.2f}B parameters, {setting['local_steps']} steps of "
        f"{setting['tokens_per_step']:,} tokens; nobody dies. The report tells 9.5 minutes a round "
        f"and about 26% waiting; its way gives {facts['round_minutes_report']:.2f} minutes here, "
        f"the last row {facts['round_minutes_best']:.2f} and {facts['tokens_per_day_ratio']:.2f} "
        f"times the tokens. With lives of {facts['lifetime_seconds_mortal'] / 3600:.1f} h the two "
        f"wait {facts['waiting_share_report_mortal']:.1%} and "
        f"{facts['waiting_share_best_mortal']:.1%}."
    )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def codec_block(facts: dict[str, Any]) -> str:
    lines = ["| codec | bytes a parameter | lost of a delta (L2) | held-out CE after the merge |"]
    lines.append("| --- | --- | --- | --- |")
    for name, c in facts["codecs"].items():
        lines.append(
            f"| `{name}` | {c['bytes_per_param']:.2f} | {c['error']:.2%} | "
            f"{c['ce_difference']:+.6f} |"
        )
    intro = (
        f"`{facts['command']}` (results/codec.json): {facts['num_workers']} workers, "
        f"{facts['steps'][1]} AdamW steps of the demo model after {facts['steps'][0]} common ones; "
        "CE in nats per masked token, against fp32:"
    )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def merge_block(facts: dict[str, Any]) -> str:
    naive = statistics.median(run["peak_mb"] for run in facts["runs"]["fetched"]["naive"])
    text = (
        f"`{facts['command']}` (results/merge.json): {facts['num_deltas']} contributions in "
        f"`{facts['codec']}` to {facts['num_params'] / 1e9:.2f}B parameters, with EMA and SWA in "
        f"the same pass, everything fsynced: {facts['peak_mb']:.0f} MB at most against "
        f"{naive:,.0f} MB for torch.load and averaging ({facts['memory_ratio']:.0f} times less). "
        f"With files that were just fetched and checked, as a merger has them, "
        f"{facts['seconds']:.0f} s, {facts['time_ratio']:.1f} times less; with files that must "
        f"come from the disk {facts['seconds_cold']:.0f} s, {facts['time_ratio_cold']:.1f} times "
        f"less: most of that is the disk's, in both ways. In CPU time the ratio is "
        f"{facts['cpu_ratio']:.1f}. Other processes ran beside the second half (load average "
        f"{facts['in_memory']['load_average_before']:.1f} at its end)."
    )
    return fill(text, WIDTH)


def exhaustive_block(facts: dict[str, Any]) -> str:
    searches = facts["searches"]
    stopped = sum(not search["whole"] for search in searches)
    ends = "each of them whole"
    if stopped:
        ends = f"{stopped} of them stopped at {facts['max_states']:,} states, the others whole"
    text = (
        f"`{facts['command']}` (results/exhaustive.json): {facts['schedules']:,} schedules through "
        f"{facts['states']:,} states in {len(searches)} searches with different bounds, {ends}: "
        f"{facts['violations']} violations."
    )
    return fill(text, WIDTH)


def long_run_block(facts: dict[str, Any]) -> str:
    text = (
        f"`{facts['command']}` (results/long_run.json): {facts['hours']:.0f} virtual hours, "
        f"{facts['worker_launches']} worker launches, {facts['merger_launches']} of mergers, "
        f"{facts['fleet_losses']} total losses; {facts['generations']} generations, "
        f"{facts['accepted']:,} contributions merged, {sum(facts['rejected'].values())} refused "
        f"({', '.join(facts['rejected']) or 'none'}); audit {facts['verdict']} after "
        f"{sum(facts['checks'].values()):,} checks."
    )
    return fill(text, WIDTH)


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "behind": behind_block,
    "demo": demo_block,
    "evaluate": evaluate_block,
    "exhaustive": exhaustive_block,
    "knobs": knobs_block,
    "likelihood": likelihood_block,
    "lineage": lineage_block,
    "pilot": pilot_block,
    "pipeline": pipeline_block,
    "precision": precision_block,
    "probes": probes_block,
    "reader": reader_block,
    "resume": resume_block,
    "allocator": allocator_block,
    "attention": attention_block,
    "optimizer": optimizer_block,
    "train": train_block,
    "train_without_bf16": partial(train_block, result="train_without_bf16"),
    "capacity": capacity_block,
    "decode": decode_block,
    "decode_2_threads": decode_block,
    "doubled": doubled_block,
    "speed": speed_block,
    "chaos": chaos_block,
    "codec": codec_block,
    "kills": kills_block,
    "long_run": long_run_block,
    "memory": memory_block,
    "merge": merge_block,
}


if __name__ == "__main__":
    main()
