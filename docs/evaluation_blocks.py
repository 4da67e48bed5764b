"""The figures of docs/evaluation.md."""

from __future__ import annotations

from textwrap import fill
from typing import Any

WIDTH = 118
COLUMNS = {
    "hellaswag": "HS", "arc_easy": "ARC-e", "arc_challenge": "ARC-c", "piqa": "PIQA",
    "winogrande": "WG", "openbookqa": "OBQA", "sciq": "SciQ", "lambada_openai": "LAMB",
    "mmlu": "MMLU",
}  # fmt: skip


def behind_block(facts: dict[str, Any]) -> str:
    """A column a number of MASKs behind, two rows a packing."""
    packings = facts["packings"]
    counts = list(next(iter(packings.values())))
    lines = [f"| rows of | | {' | '.join(f'{n} behind' for n in counts)} |"]
    lines.append("| --- " * (2 + len(counts)) + "|")
    names = {"best_fit": "whole documents", "chop": "documents cut where rows end"}
    for packing, found in packings.items():
        shares = (found[n]["right"] for n in counts)
        right = " | ".join(
            f"{100 * x['mean']:.0f}±{50 * (x['high'] - x['low']):.0f}" for x in shares
        )
        nats = " | ".join(f"{found[n]['nats']:.2f}" for n in counts)
        lines += [f"| {names[packing]} | right, % | {right} |", f"| | nats | {nats} |"]
    intro = (
        f"`{facts['command']}` (results/behind.json): a denoiser of {facts['parameters']:,} "
        f"parameters after {facts['steps']} steps on documents of a few sentences, each of which "
        f"ends as the one before it; {facts['items']} such sentences without their last word, and "
        "the word by the chain rule: share that is the model's first choice (LAMBADA's figure), "
        "with half the width of its 95% interval, and nats of the word."
    )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def likelihood_block(facts: dict[str, Any]) -> str:
    lines = ["| requests | forward tokens | CPU time | forward tokens, rows of 2,048 |"]
    lines.append("| --- | --- | --- | --- |")
    for name, one in {**facts["workloads"], "all": facts}.items():
        lines.append(
            f"| {name} | {one['forward_token_ratio']:.2f} | {one['time_ratio']:.2f} | "
            f"{one['forward_token_ratio_full_rows']:.0f} |"
        )
    intro = (
        f"`{facts['command']}` (results/likelihood.json), a padded row per token over ours; the "
        f"scores differ by {facts['max_abs_difference']:.1e} nats at most:"
    )
    screen = facts.get("screen")
    return "\n".join([fill(intro, WIDTH), "", *lines, *(_screen(screen) if screen else [])])


def _screen(screen: dict[str, Any]) -> list[str]:
    model, items = screen["model"], next(iter(screen["shapes"].values()))["items"]
    intro = (
        f"The chain rule over the screen, on {items} items of held-out text each, with a model of "
        f"{model['parameters'] / 1e6:.1f}M parameters and {model['layers']} layers trained for "
        f"{model['steps']:,} steps; in brackets the screen alone, with no item scored again:"
    )
    lines = ["| items | forward tokens | CPU time | same best choice | nats a token off, alone |"]
    lines.append("| --- | --- | --- | --- | --- |")
    lines += [
        f"| {name} | {one['forward_token_ratio']:.2f} ({one['forward_token_ratio_alone']:.2f}) | "
        f"{one['time_ratio']:.2f} ({one['time_ratio_alone']:.2f}) | "
        f"{100 * one['same_best']:.1f}% ({100 * one['same_best_alone']:.1f}%) | "
        f"{one['difference_a_token']:.3f} |"
        for name, one in screen["shapes"].items()
    ]
    return ["", fill(intro, WIDTH), "", *lines]


def evaluate_block(facts: dict[str, Any]) -> str:
    """The report's columns: a row a model, accuracy with half the width of its interval."""
    first = facts["models"][0]["tasks"]
    lines = [f"| model | {' | '.join(COLUMNS[name] for name in first)} |"]
    lines.append("| --- " * (1 + len(first)) + "|")
    for model in facts["models"]:
        cells = [_accuracy(model["tasks"][name]) for name in first]
        lines.append(f"| {model['name']} ({model['scored_by']}) | {' | '.join(cells)} |")
    chance = [f"{100 * result['chance']:.0f}" for result in first.values()]
    lines.append(f"| a guess | {' | '.join(chance)} |")
    splits = ", ".join(f"{COLUMNS[name]} {result['split']}" for name, result in first.items())
    intro = (
        f"`{facts['command']}` (results/evaluate.json), {facts['limit']} evenly spaced items of "
        f"each task, zero-shot, in percent with half the width of the 95% interval. Splits: "
        f"{splits}. {_how_scored(facts['models'])}"
    )
    return "\n".join([fill(intro, WIDTH), "", *lines, "", fill(_beside(facts), WIDTH)])


def _how_scored(models: list[dict[str, Any]]) -> str:
    """What the name of the scorer does not tell: MASKs behind, and contexts that were cut."""
    ours = [model for model in models if model.get("scorer")]
    masks = " and ".join(map(str, sorted({model["scorer"]["right_masks"] for model in ours})))
    cut = ", ".join(
        f"{model['num_truncated']} of {model['name']} (to {model['max_tokens']} tokens)"
        for model in ours
    )
    return f"MASKs behind a continuation: {masks}. Contexts cut from the left: {cut}."


def _accuracy(result: dict[str, Any]) -> str:
    reach = (result["interval"]["high"] - result["interval"]["low"]) / 2
    return f"{100 * result['value']:.0f}±{100 * reach:.0f}"


def _beside(facts: dict[str, Any]) -> str:
    misses = [COLUMNS[name] for name, holds in facts["random_at_chance"].items() if not holds]
    said = f"not at chance on {', '.join(misses)}" if misses else "at chance on every task"
    text = f"The untrained model is {said} (intervals that hold together with 95%)."
    one = facts["side_by_side"]
    if one is not None:
        ours, theirs = (100 * one[key]["acc_norm"] for key in ("evaluate", "lm_eval"))
        text += (
            f" {one['model']} on {COLUMNS[one['task']]} ({one['num_items']} items): {ours:.1f} by "
            f"this command, {theirs:.1f} by lm-eval's own; no log-likelihood differs by more than "
            f"{one['max_abs_difference']:.0e} nats."
        )
    return text


def probes_block(facts: dict[str, Any]) -> str:
    """A row a figure, a column a model."""
    models = facts["models"]
    names = list(dict.fromkeys(name for model in models for name in model["figures"]))
    lines = [f"| figure | {' | '.join(model['model'] for model in models)} |"]
    lines.append("| --- " * (len(models) + 1) + "|")
    for name in names:
        cells = [_with_interval(model["figures"].get(name)) for model in models]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    sets = ", ".join(f"{name} {p['rows']}" for name, p in facts["probes"].items())
    intro = (
        f"`{facts['command']}` (results/probes.json): rows of each set: {sets}; "
        f"{sum(facts['fact_probe']['facts'].values()):,} facts. Nats per "
        "masked token in the sets and per answer token in `fact nll`, shares in the others; in "
        "brackets 95% intervals."
    )
    return "\n".join([fill(intro, WIDTH), "", *lines])


def _with_interval(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
