"""The generated tables of the pilot and of speed, from results/, for render.py."""

from __future__ import annotations

from textwrap import fill
from typing import Any

WIDTH = 118


def pilot_block(facts: dict[str, Any]) -> str:
    """The card's table: the judge's figure, and beside it what keeps it honest."""
    models, arms = facts["models"], facts["arms"]
    size, step = models["diffusion"]["parameters"], models["diffusion"]["origin"].get("step")
    intro = (
        f"`{facts['command']}` (results/pilot.json): a pair of {size:,} parameters, {step} steps "
        f"of the same rows; {facts['num_prompts']} held-out prompts of {facts['prompt_tokens']} "
        f"tokens, {facts['num_tokens']} to write; judge {facts['judge']}. In brackets 95% "
        "intervals over the prompts; differences are paired by prompt."
    )
    methods = [row for row in arms.values() if not row["how"]["changes_tuned"]]
    changed = [row for row in arms.values() if row["how"]["changes_tuned"]]
    against = {"draft": "against draft only", "ar": "against AR"}
    lines = [fill(intro, WIDTH), "", *judged_lines(methods, against, facts["num_tokens"])]
    if changed:
        one = "*Tuned* with one thing changed at a time:"
        lines += [
            "",
            one,
            "",
            *judged_lines(changed, {"tuned": "against tuned"}, facts["num_tokens"]),
        ]
    return "\n".join(lines)


def knobs_block(facts: dict[str, Any]) -> str:
    """Ways of one denoiser to write, all beside *tuned*."""
    model = facts["models"]["diffusion"]
    intro = (
        f"`{facts['command']}` (results/knobs.json): the same denoiser trained again (held-out "
        f"CE {model['held_out_ce']:.2f}); the same {facts['num_prompts']} prompts, "
        f"seeds and judge."
    )
    lines = judged_lines(
        list(facts["arms"].values()), {"tuned": "against tuned"}, facts["num_tokens"]
    )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def doubled_block(facts: dict[str, Any]) -> str:
    """Doubled tokens of ways to write, each beside its draft."""
    intro = (
        f"`{facts['command']}` (results/doubled.json): the denoiser trained again, "
        f"`{facts['decode']}`, the pilot's {facts['num_prompts']} prompts with {facts['seeds']} "
        "seeds each. In brackets 95% intervals over the prompts, of differences paired by prompt."
    )
    lines = [
        "| | calls | doubled | of pairs | share | less the draft's | distinct-2 |",
        "| --- " * 7 + "|",
    ]
    for name, way in facts["ways"].items():
        share, less = way["share"], way["difference"]
        beside = "-" if way["against"] == name else percents(less, "+.3%")
        lines.append(
            f"| {name} | {way['calls']} | {way['doubled']:,} | {way['pairs']:,} | "
            f"{percents(share, '.3%')} | {beside} | {way['distinct_2']:.3f} |"
        )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def percents(found: dict[str, Any], spec: str) -> str:
    return f"{found['mean']:{spec}} [{found['low']:{spec}}, {found['high']:{spec}}]"


def judged_lines(rows: list[dict[str, Any]], against: dict[str, str], num_tokens: int) -> list[str]:
    """A table; `against` has the arms that the judge's figure is compared with, and how to say
    it; `num_tokens` were to be written."""
    columns = ["", "calls", "judge NLL", *against.values(), "doubled", "words", "distinct-2"]
    columns += ["per sample", "entropy", "ended", "on the last", "empty"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        calls, stats = row["num_forward_passes"], row["statistics"]
        cells = [
            row["title"],
            "-" if calls is None else str(calls),
            interval(row["nll"]),
            *(difference(row, name) for name in against),
            f"{stats['doubled_tokens']:.2%}",
            f"{stats['doubled_words']:.2%}",
            f"{stats['distinct_2']:.3f}",
            f"{stats['distinct_2_per_sample']:.3f}",
            f"{stats['unigram_entropy']:.2f}",
            *map(str, ends(row["items"]["pairs"], num_tokens)),
            str(stats["num_empty"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ends(pairs: list[int], num_tokens: int) -> tuple[int, int]:
    """How many texts have EOS before their last token, and how many as their last: a text of n
    tokens has n - 1 pairs, and its EOS is not of it."""
    return sum(n < num_tokens - 2 for n in pairs), sum(n == num_tokens - 2 for n in pairs)


def interval(found: dict[str, Any]) -> str:
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def difference(row: dict[str, Any], name: str) -> str:
    """The judge's figure less that of the arm `name`; nothing for the arm itself."""
    found = row["minus"].get(name)
    if found is None or found["nll"]["low"] == found["nll"]["high"] == 0:
        return "-"
    nll = found["nll"]
    return f"{nll['mean']:+.3f} [{nll['low']:+.3f}, {nll['high']:+.3f}]"


def speed_block(facts: dict[str, Any]) -> str:
    intro = (
        f"`{facts['command']}` (results/speed.json): {facts['parameters']:,} parameters, "
        f"{facts['num_tokens']} new tokens a row behind 32; {facts['device']}, "
        f"{facts['precision']}, {facts['threads']} threads; AR generate() is transformers with its "
        "KV cache at the same size. Only written tokens are counted. Behind: the share of the time "
        "that the products would take at this device's peak, and reading all weights once a pass."
    )
    lines = [
        "| batch | | passes | tokens/s | tokens a pass | ms a pass | over its forward | over AR | "
        "FLOPs | reads |",
        "| --- " * 10 + "|",
    ]
    for batch, rows in facts["batches"].items():
        for name, row in rows.items():
            ratios = (row.get("pass_over_forward"), row.get("vs_ar_generate"))
            shown = " | ".join(map(ratio, ratios))
            lines.append(
                f"| {batch} | {name} | {row['num_passes']} | {row['tokens_per_second']:,.0f} | "
                f"{row['tokens_per_forward']:g} | {row['ms_per_pass']:.2f} | {shown} | "
                f"{share(row.get('flop_limit_share'))} | {share(row.get('read_limit_share'))} |"
            )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def decode_block(facts: dict[str, Any]) -> str:
    threads = facts["machine"]["threads"]
    file = f"decode_{threads}_threads" if threads > 1 else "decode"
    lines = [
        f"`{facts['command']}` (results/{file}.json): {facts['num_tokens']} tokens at batch 1, "
        f"{threads} thread{'s' * (threads > 1)}, {facts.get('basis', 'CPU seconds')}:",
        "",
        "| size | a pass over its forward | over AR generate() | the same at this CPU's peak | "
        "over our AR twin | over the plain loop | tokens a pass | ms a pass |",
        "| --- " * 8 + "|",
    ]
    rows = dict(facts["sizes"])
    rows |= {f"{name}, bfloat16": s for name, s in (facts["sizes_bfloat16"] or {}).items()}
    for name, size in rows.items():
        lines.append(
            f"| {name} | {size['pass_over_forward']:.2f} | {ratio(size['vs_ar_generate'])} | "
            f"{ratio(size.get('vs_ar_generate_at_peak'))} | "
            f"{size['vs_ar_twin']:.2f} | {size['vs_plain_loop']:.2f} | "
            f"{size['tokens_per_forward']:g} | {size['ms_per_pass']:.1f} |"
        )
    if all("positions_kept" in size for size in rows.values()):
        lines += ["", *faster_lines(rows)]
    return "\n".join(lines)


def faster_lines(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A table of what kept keys and values and compiled blocks change."""
    lines = [
        "Keys and values kept for three passes of four (`refresh_every = 4`: approximate), and "
        "compiled blocks:",
        "",
        "| size | kept: positions computed | over exact | over AR generate() | compiled: over "
        "eager | a forward over an eager one |",
        "| --- " * 6 + "|",
    ]
    for name, size in rows.items():
        keys = ("vs_exact_kept", "vs_ar_generate_kept", "vs_eager_compiled")
        cells = [ratio(size[key]) for key in (*keys, "forward_vs_eager_compiled")]
        lines.append(f"| {name} | {size['positions_kept']:.0%} | {' | '.join(cells)} |")
    return lines


def share(found: float | None) -> str:
    return "-" if found is None else f"{found:.1%}"


def ratio(found: float | None) -> str:
    return "-" if found is None else f"{found:.2f}"
