"""Tables of a card, in Markdown. Every cell is a figure of a source, rounded; nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffurefill.evaluate.harness.tasks import BENCHMARKS
from diffurefill.evaluate.probes import HeldOut
from diffurefill.evaluate.statistics import bootstrap_mean
from diffurefill.release.card.model import CardModel
from diffurefill.runtime import without_folders

Rows = list[list[str]]

SHARES = ("token", "pair")
FACTS = {
    "choice": "facts: choice (chance 25%)",
    "nll": "facts: NLL of the answer",
    "exact": "facts: exact match",
    "contained": "facts: contained",
}


def markdown(rows: Rows) -> str:
    """`rows` with the header first."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(model: CardModel) -> Rows:
    config = model.config.model
    data, objective = model.config.data, model.config.objective
    rows = [
        ["", ""],
        ["parameters", f"{model.parameters:,} (the embedding is also the head)"],
        [
            "architecture",
            f"{config.layers} blocks of width {config.width}, {config.heads} heads, SwiGLU "
            f"{config.ffn_width}, RMSNorm, rotary positions, attention both ways",
        ],
        ["context", f"{data.row_length:,} tokens"],
        ["tokenizer", f"{model.num_pieces:,} pieces, MASK and PAD above them"],
        [
            "objective",
            f"masked diffusion, t from {objective.t_min:g} to 1, loss {objective.loss} over masked "
            f"positions; {objective.prefix_rows:.0%} of the rows keep a clean prefix, in "
            f"{data.span_rows:.0%} whole spans are masked",
        ],
    ]
    return rows + [[name, str(value)] for name, value in _where_from(model.provenance)]


def _where_from(provenance: dict[str, Any]) -> list[tuple[str, Any]]:
    weights = provenance.get("weights", "imported")
    if "generation" not in provenance:
        return [("weights", weights)]
    merged = provenance["globals"]
    return [
        ("weights", f"{weights}, made of {merged} merged global{'s' if merged > 1 else ''}"),
        ("generation", f"{provenance['generation']} of run {provenance['run_id']}"),
    ]


def training(model: CardModel) -> Rows:
    """Steps, tokens and FLOPs as far as they are known."""
    optim, train, fleet = model.config.optim, model.config.train, model.config.fleet
    provenance = model.provenance
    rows = [["", ""]]
    if "step" in provenance:
        rows.append(["steps", f"{provenance['step']:,} of {optim.total_steps:,} planned"])
    if "tokens" in provenance:
        rows.append(["tokens", f"{provenance['tokens']:,}"])
    if model.training_flops is not None:
        rows.append(["FLOPs by 6ND", f"{model.training_flops:.3e}"])
    if model.exact_training_flops is not None:
        rows.append(["FLOPs, exact", f"{model.exact_training_flops:.3e}"])
    tokens = train.batch_rows * model.config.data.row_length
    rates = ", ".join(f"{rate:g} from step {step:,}" for step, rate in optim.peak_lr)
    rows += [
        ["batch", f"{train.batch_rows} rows, {tokens:,} tokens at most"],
        ["optimiser", f"{optim.optimizer}, weight decay {optim.weight_decay:g}"],
        ["peak learning rate", f"{rates}; {optim.warmup_steps:,} steps of warm-up"],
    ]
    if "generation" in provenance:
        rows.append(
            [
                "fleet",
                f"workers without a connection take {fleet.local_steps} steps by themselves; their "
                f"changes are averaged ({fleet.outer_step}, {fleet.codec})",
            ]
        )
    return rows


def data_mix(model: CardModel) -> Rows:
    """Shares of the documents drawn, by phase."""
    data = model.config.data
    rows = [["from step", "source", "share of documents", "paths"]]
    paths = {source.name: source.paths for source in data.sources}
    for phase in data.phases or (data.phase_at(0),):
        for name, share in phase.shares:
            shown = ", ".join(f"`{path}`" for path in paths[name])
            rows.append([f"{phase.from_step:,}", name, f"{share:.1%}", shown])
    return rows


def probes(records: Sequence[dict[str, Any]]) -> Rows:
    """A figure a row, a model a column; in brackets the 95% interval over rows or facts."""
    rows = [["figure", *(_name(record["model"]) for record in records)]]
    for name in dict.fromkeys(name for record in records for name in record["sets"]):
        found = [record["sets"].get(name) for record in records]
        digest = next(one["probe"] for one in found if one)
        rows.append([f"{name}, CE (probe {digest})", *(_ce(one) for one in found)])
    for share in SHARES:
        values = [(record.get("decoding_accuracy") or {}).get(share) for record in records]
        if any(value is not None for value in values):
            rows.append([f"decoding accuracy, {share}", *(_or_dash(v, ".1%") for v in values)])
    for name, heading in FACTS.items():
        cells = [_interval((record.get("facts") or {}).get(name), name) for record in records]
        if any(cell != "-" for cell in cells):
            rows.append([heading, *cells])
    return rows


def _name(model: str) -> str:
    """As the file has it, without the folder that the model lay in."""
    return ": ".join(map(without_folders, model.split(": ", 1)))


def _ce(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    if "rows" not in found:
        return f"{found['mean']:.4f}"
    rows = {float(rate): [(s, n) for s, n in items] for rate, items in found["rows"].items()}
    by_rate = {float(rate): ce for rate, ce in found["by_rate"].items()}
    interval = bootstrap_mean(HeldOut(found["probe"], by_rate, rows).row_values())
    return f"{found['mean']:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _interval(found: dict[str, float] | None, name: str) -> str:
    if found is None:
        return "-"
    spec = ".3f" if name == "nll" else ".1%"
    return f"{found['mean']:{spec}} [{found['low']:{spec}}, {found['high']:{spec}}]"


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def benchmarks(models: Sequence[dict[str, Any]]) -> Rows:
    """Accuracy in percent with its 95% interval, a benchmark a row."""
    header = ["benchmark", "split", "metric", "items", "chance"]
    rows = [[*header, *(f"{model['name']} ({model['scored_by']})" for model in models)]]
    for name, first in models[0]["tasks"].items():
        items = f"{first['num_items']:,} of {first['num_items_of_task']:,}"
        about = [BENCHMARKS[name].column, first["split"], first["metric"], items]
        cells = [_accuracy(model["tasks"][name]) for model in models]
        rows.append([*about, f"{100 * first['chance']:.0f}", *cells])
    return rows


def _accuracy(result: dict[str, Any]) -> str:
    low, high = (100 * result["interval"][end] for end in ("low", "high"))
    return f"{100 * result['value']:.1f} [{low:.1f}, {high:.1f}]"


def at_chance(model: dict[str, Any]) -> list[str]:
    """Benchmarks on which guessing lies in the model's interval."""
    return [
        BENCHMARKS[name].column
        for name, result in model["tasks"].items()
        if result["interval"]["low"] <= result["chance"] <= result["interval"]["high"]
    ]
