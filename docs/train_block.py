"""The generated figures of docs/performance.md, from results/train.json, for render.py."""

from __future__ import annotations

from textwrap import fill
from typing import Any

WIDTH = 118
ROWS = {
    "ours": "ours, AdamW, fp32",
    "ours_muon": "ours, Muon, fp32",
    "ours_compiled": "ours, AdamW, fp32, blocks compiled",
    "ours_bf16": "ours, AdamW, bf16 autocast",
    "ours_muon_bf16": "ours, Muon, bf16 autocast",
    "ours_compiled_bf16": "ours, AdamW, bf16, blocks compiled",
    "matmul_floor": "our matrix products alone, fp32",
    "matmul_floor_bf16": "our matrix products alone, bf16",
    "full_head": "full head, AdamW, fp32",
    "full_head_bf16": "full head, AdamW, bf16 autocast",
    "full_head_dllm": "full head and loss as dllm, AdamW, fp32",
    "full_head_dllm_bf16": "full head and loss as dllm, AdamW, bf16 autocast",
    "torchdiff_plain": "torchdiff plain, AdamW, bf16 as it comes",
    "torchdiff_plain_fp32": "torchdiff plain, AdamW, fp32",
    "torchdiff_default": "torchdiff default, Muon, bf16 as it comes",
    "torchdiff_default_fp32": "torchdiff default, Muon, fp32",
}
SHOWN_OPERATORS = 8


def train_block(facts: dict[str, Any], result: str = "train") -> str:
    shapes = facts["shapes"]
    titles = [
        f"{name}: {s['parameters'] / 1e6:.2f}M, {s['batch'][0]} x {s['batch'][1]}"
        for name, s in shapes.items()
    ]
    lines = [
        f"`{facts['command']}` (results/{result}.json), CPU seconds of a step:",
        "",
        f"| step | {' | '.join(titles)} |",
        f"| --- | {' | '.join('---' for _ in shapes)} |",
    ]
    for key, label in ROWS.items():
        cells = [s["cpu_seconds"].get(key) for s in shapes.values()]
        if any(cells):
            shown = " | ".join("-" if cell is None else f"{cell:.3f}" for cell in cells)
            lines.append(f"| {label} | {shown} |")
    for name, s in shapes.items():
        largest = list(s["operator_shares"].items())[:SHOWN_OPERATORS]
        parts = ", ".join(f"`{operator}` {share:.1%}" for operator, share in largest)
        text = f"{name}, {ratios(s)} Where its time goes, by operator: {parts}."
        lines += ["", fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines)


def ratios(shape: dict[str, Any]) -> str:
    """What a shape says in the precision of `auto`, and in the others."""
    own = shape["precision"]
    others = [name for name in shape["in_one_precision"] if name != own]
    found = [f"in {own}, which `auto` takes on this CPU: {one_precision(shape)}"]
    own_ratio = shape["in_one_precision"][own]
    if own == "fp32" and own_ratio["vs_torchdiff_default"]:  # as it comes it emulates bf16 there
        found.append(f"Both in fp32: {beside_torchdiff(own_ratio)}.")
    found += [f"In {name}: {one_precision(shape['in_one_precision'][name])}" for name in others]
    return " ".join(found)


def one_precision(ratio: dict[str, Any]) -> str:
    found = (
        f"{ratio['vs_full_head']:.2f} times as fast as the full head (its products alone would be "
        f"{ratio['vs_full_head_at_most']:.2f} times) and {ratio['vs_full_head_dllm']:.2f} times as "
        f"fast as dllm's way, {ratio['over_matmul_floor']:.2f} times the time of its products"
    )
    if ratio["compiled_vs_full_head"]:
        found += (
            f"; with blocks compiled {ratio['compiled_vs_full_head']:.2f}, "
            f"{ratio['compiled_vs_full_head_dllm']:.2f} and "
            f"{ratio['compiled_over_matmul_floor']:.2f} times"
        )
    if ratio["vs_torchdiff_default"]:
        found += f"; {beside_torchdiff(ratio)}"
    return found + "."


def beside_torchdiff(ratio: dict[str, Any]) -> str:
    default, plain = ratio["vs_torchdiff_default"], ratio["vs_torchdiff_plain"]
    return f"{default:.2f} and {plain:.2f} times as fast as torchdiff's default and plain step"


def attention_block(facts: dict[str, Any]) -> str:
    half = facts["cases_bf16"]
    precisions = "fp32 and bf16" if half else "fp32"
    lines = [
        f"`{facts['command']}` (results/attention.json), one thread, {precisions}, forward and "
        "backward, time over that of our attention without a mask; behind `torch` the time of "
        "torch's own operator without a mask over that of our default:",
        "",
        "| shape | dense mask | document by document | by default | torch |"
        + (" bf16: dense mask | document by document | by default | torch |" if half else ""),
        "| --- " * (9 if half else 5) + "|",
    ]
    for name, case in facts["cases"].items():
        cells = attention_cells(case) + (attention_cells(half[name]) if half else [])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    worst = [f"in fp32 {worst_default(facts['cases'])}"]
    if half:
        worst.append(f"in bf16 {worst_default(half)}")
    ends = f"Where documents cost most, the default takes, {'; '.join(worst)}."
    return "\n".join([*lines, "", fill(ends, WIDTH)])


def worst_default(cases: dict[str, Any]) -> str:
    ours = max(case["default_over_full"] for case in cases.values())
    torchs = max(1 / case["torch_over_default"] for case in cases.values())
    return f"{ours:.2f} of our time without a mask and {torchs:.2f} of torch's"


def attention_cells(case: dict[str, Any]) -> list[str]:
    ratio, default = case["ratio"], case["default_over_full"]
    return [
        *(f"{ratio[b]:.2f}" if b in ratio else "-" for b in ("sdpa", "loop")),
        f"{default:.2f} ({case['default']})",
        f"{case['torch_over_default']:.2f}",
    ]


def optimizer_block(facts: dict[str, Any]) -> str:
    text = (
        f"`{facts['command']}` (results/optimizer.json): stand-38m at {facts['tokens']:,} tokens, "
        f"CPU seconds as a share of forward and backward in {facts['precision']}: Muon with AdamW "
        f"{facts['muon_share']:.0%} (of those in fp32 {facts['muon_share_of_fp32']:.0%}; in fp32 "
        f"itself {facts['muon_float32_share']:.0%}, by batched products alone "
        f"{facts['muon_batched_share']:.0%}), `torch.optim.Muon` "
        f"{facts['torch_muon_share']:.0%}, fused AdamW {facts['adamw_fused_share']:.1%}, cautious "
        f"{facts['adamw_cautious_share']:.1%}. At most 25% was aimed for."
    )
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def allocator_block(facts: dict[str, Any]) -> str:
    gains = [
        f"{case['gain']:.3f} on {name} ({case['glibc']['page_faults']:,.0f} pages a step from the "
        f"system before, {case['ours']['page_faults']:,.0f} now; {case['glibc']['peak_mb']:,.0f} "
        f"and {case['ours']['peak_mb']:,.0f} MB at most)"
        for name, case in facts["presets"].items()
    ]
    text = (
        f"`{facts['command']}` (results/allocator.json): CPU seconds of a step with glibc as it is "
        f"over those with freed memory kept, one thread, {facts['repeats']} processes of each by "
        f"turns: {'; '.join(gains)}."
    )
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def precision_block(facts: dict[str, Any]) -> str:
    differences = ", ".join(f"{d:+.4f}" for d in facts["differences"])
    text = (
        f"`{facts['command']}` (results/precision.json): {facts['steps']} steps of stand-micro in "
        "bf16 less the same in fp32, same seeds, held-out CE in nats per masked token: "
        f"{differences} for {facts['seeds']} seeds, which by themselves lie "
        f"{facts['spread_of_seeds']:.4f} apart; bf16 took its steps "
        f"{facts['bf16_over_fp32_speed']:.2f} times as fast."
    )
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
