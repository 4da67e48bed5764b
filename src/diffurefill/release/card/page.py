"""The card's text, section by section; a section without its file is left out.

Figures come from tables.py and from the files alone. Below each table stands the file it is from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diffurefill.config import UserError
from diffurefill.fleet.exported import CURVE
from diffurefill.release.card import tables
from diffurefill.release.card.metadata import metadata
from diffurefill.release.card.model import CardModel
from diffurefill.release.card.progress import progress_rows
from diffurefill.release.card.sources import Source, one_of

SCORERS = {
    "chain": "exactly, left to right: each token from the text before it",
    "chain, two_stream screen": "as `chain` does where two choices are close, and elsewhere by an "
    "approximation in one pass",
    "right_to_left": "exactly, right to left",
    "confidence": "exactly, for the sampler that fills the surest place first",
    "margin": "exactly, for the sampler that fills the place of the largest margin first",
    "entropy": "exactly, for the sampler that fills the place of the least entropy first",
    "elbo": "by a Monte Carlo bound",
}

GUIDED = (
    "; guidance moves the logits away from what they are without the context, so that figures with "
    "it are no likelihoods of the model"
)


def card(
    model: CardModel,
    sources: Sequence[Source],
    *,
    repo: str,
    license_name: str | None = None,
    language: str | None = None,
) -> str:
    """The whole README.md. `repo`: what a reader gives to `from_pretrained`.

    Raises UserError where a source is of another run or of other weights.
    """
    benchmarks, probes = one_of(sources, "benchmarks"), one_of(sources, "probes")
    progress, pick = one_of(sources, "progress"), one_of(sources, "pick")
    require_own_run(model, sources)
    own = own_results(model, benchmarks)
    parts = [
        metadata(model, own, license_name, language),
        f"# {model.name}",
        INTRODUCTION.format(parameters=f"{model.parameters:,}"),
        _table("## The model", tables.facts(model), "config.json, run.toml and provenance.json"),
        f"## How to generate\n\n{how_to_generate(model, repo)}",
        _table("## Training", tables.training(model), "run.toml and provenance.json"),
        _table("## Data", tables.data_mix(model), "run.toml"),
        *(_progress(progress) if progress else ()),
        *([_probes(probes)] if probes else ()),
        *([_pick(pick)] if pick else ()),
        *([_benchmarks(benchmarks)] if benchmarks else ()),
        f"## Limits\n\n{_bullets(limits(model, own, probes or pick))}",
        *([_table("## Result files", _result_files(sources), None)] if sources else ()),
    ]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = (
    "A masked-diffusion language model of {parameters} parameters. It drafts a whole text in a few "
    "parallel passes, then rewrites the tokens that it is least sure of with both sides in view. "
    "It fills gaps anywhere in a text as well as it continues one."
)


def own_results(model: CardModel, benchmarks: Source | None) -> dict[str, Any] | None:
    """Of the models in the file the card's own, by the digest of its weights.

    Raises UserError where it is not among them: the size alone tells no weights apart.
    """
    if benchmarks is None:
        return None
    for found in benchmarks.content["models"]:
        is_ours = found.get("kind") == "diffurefill"
        if is_ours and found.get("weights_sha256") == model.weights_sha256:
            return found
    names = ", ".join(str(found.get("name")) for found in benchmarks.content["models"])
    raise UserError(
        f"{benchmarks.name} has figures of other weights ({names}): evaluate this model, whose "
        f"weights are {model.weights_sha256}"
    )


def require_own_run(model: CardModel, sources: Sequence[Source]) -> None:
    """UserError for the progress of another run, and for a pick among other weights."""
    run, generation = (model.provenance.get(key) for key in ("run_id", "generation"))
    progress, pick = one_of(sources, "progress"), one_of(sources, "pick")
    others = {record.get("run") for record in progress.content} - {run} if progress else ()
    if progress and others:
        raise UserError(
            f"{progress.name} is of run {', '.join(map(str, others))}, this model of "
            f"{run or 'no known run'}: give the log of its own run, or leave it out"
        )
    made = (pick.content.get("run_id"), pick.content.get("generation")) if pick else (None, None)
    if pick and made != (run, generation):
        raise UserError(
            f"{pick.name} is a pick of run {made[0]} at generation {made[1]}, this model of "
            f"{run or 'no known run'} at {generation}: pick again, or leave it out"
        )


def limits(model: CardModel, own: dict[str, Any] | None, probes: Source | None) -> Iterator[str]:
    """What a reader must not expect; each line follows from a file or from what the model is."""
    yield (
        "Pretrained only: it continues text and follows no instructions. Nothing was done for its "
        "safety."
    )
    tokens = model.provenance.get("tokens")
    if tokens is not None:
        yield f"It has seen {tokens / model.parameters:.1f} tokens a parameter."
    planned, step = model.config.optim.total_steps, model.provenance.get("step")
    if step is not None and step < planned:
        yield f"Unfinished: {step:,} of {planned:,} steps."
    if own is None:
        yield "No public benchmark was run."
    elif tables.at_chance(own):
        names = ", ".join(tables.at_chance(own))
        yield f"Not told from guessing (chance lies in the interval): {names}."
    if own is not None and own.get("num_truncated"):
        yield (
            f"{own['num_truncated']:,} contexts of the benchmarks were cut from the left to "
            f"{own['max_tokens']:,} tokens."
        )
    if probes is None:
        yield "Its probes are not shown here."
    yield f"A row holds at most {model.config.data.row_length:,} tokens, prompt included."


def how_to_generate(model: CardModel, repo: str) -> str:
    return f"""```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}", trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained("{repo}", trust_remote_code=True)
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```

or, with the package itself, `diffurefill generate {repo} --prompt "Once upon a time"` and
`diffurefill infill {repo} --text "The [MASK*4] ran away."`. {_cost(model)}"""


def _cost(model: CardModel) -> str:
    passes = [stage.num_passes for stage in model.config.decode.stages]
    if not all(passes):  # a stage that takes as many as its text needs
        return "How many passes a text takes depends on its length."
    return f"A text of any length takes {sum(passes)} passes ({' + '.join(map(str, passes))})."


def _progress(source: Source) -> list[str]:
    alt = "held-out cross entropy by generation"
    return [_table(f"## Progress\n\n![{alt}]({CURVE})", progress_rows(source.content), source.name)]


def _probes(source: Source) -> str:
    heading = (
        "## Probes\n\nFixed text and fixed masks, never trained on; cross entropy in nats per "
        "masked token. In brackets: 95% intervals, by bootstrap over rows or facts."
    )
    return _table(heading, tables.probes(source.content), source.name)


def _pick(source: Source) -> str:
    content = source.content
    heading = f"## Which weights\n\nPicked: {content['picked']}. The rule: {content['rule']}."
    return _table(heading, tables.probes(content["candidates"]), source.name)


def _benchmarks(source: Source) -> str:
    content = source.content
    kinds = dict.fromkeys(kind for m in content["models"] if (kind := _kind(m["scored_by"])))
    how = "; ".join(f"`{kind}` scores {SCORERS[kind]}" for kind in kinds)
    guided = any("guidance" in m["scored_by"] for m in content["models"])
    how += GUIDED if guided else ""
    subset = "all items"
    if content.get("limit") is not None:
        subset = f"{content['limit']} items of each, evenly spaced"
    heading = (
        f"## Benchmarks\n\nZero-shot, lm-evaluation-harness {content['versions']['lm_eval']}, "
        f"{subset}; accuracy in percent with its 95% interval. {how}."
    )
    return _table(heading, tables.benchmarks(content["models"]), source.name)


def _kind(scored_by: str) -> str | None:
    """The scorer that a name begins with, its options aside; None for a likelihood of no scorer."""
    fits = (k for k in SCORERS if scored_by == k or scored_by.startswith(f"{k}, "))
    return max(fits, key=len, default=None)


def _result_files(sources: Sequence[Source]) -> tables.Rows:
    rows = [["file", "sha256", "made by"]]
    return rows + [[source.name, source.sha256[:12], source.made_by] for source in sources]


def _table(heading: str, rows: tables.Rows, source: str | None) -> str:
    origin = f"\n\nFrom {source}." if source else ""
    return f"{heading}\n\n{tables.markdown(rows)}{origin}"


def _bullets(lines: Iterator[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
