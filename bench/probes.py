"""Every probe on trained models, on the same model untrained, and on one that was taught the facts.

    python bench/probes.py MODEL... | --quick [MODEL...]

MODEL: folders of `train`, all of one tokenizer. The probes are those of the first one, and beside
its held-out text: short starts of it, passages of Wikipedia, the Python standard library, and 1,050
facts of PopQA. Two controls stand beside the models. `untrained` has the first one's sizes and its
first weights: choice must come out at chance. `taught` is a small model trained on nothing but the
fact sentences, one in ten held out: it must choose right on the others. --quick: 8 rows a set, 104
facts, a control taught for a few steps; prints only, of a barely trained model without MODEL.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from _barely_trained import barely_trained
from _common import ROOT, report
from diffurefill.config import ProbeConfig, RunConfig, Source, load_preset
from diffurefill.data.documents import open_corpus
from diffurefill.evaluate.facts.build import NUM_FACTS, build_fact_probe, choice_by_frequency
from diffurefill.evaluate.facts.popqa import read_questions
from diffurefill.evaluate.facts.probe import FactProbe
from diffurefill.evaluate.probe_sets import Probes, build_probes
from diffurefill.evaluate.scores import Scores, differences, own_intervals, score
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.loading import LoadedModel, load
from diffurefill.runtime import set_threads
from diffurefill.train.loop import initial_weights

SHARED = ROOT.parent / "shared" / "data"
APART = (
    Source(name="wiki", paths=(str(SHARED / "text/wiki-passages/data/validation-*.parquet"),)),
    Source(name="code", paths=("python:",)),
)
QUICK_ROWS, QUICK_FACTS = 8, 104
CONTROL_STEPS, QUICK_STEPS = 800, 10


def probes_of(model: LoadedModel) -> Probes:
    """The sets of the model's run, and those of APART, made as `init` would have made them."""
    config = model.config
    data = replace(config.data, probe_sources=(*config.data.probe_sources, *APART))
    sets = (*config.probe.sets, *(source.name for source in APART))
    config = replace(config, data=data, probe=replace(config.probe, sets=sets))
    probes = build_probes(config, open_corpus(config.data), model.tokenizer)
    return {**probes, **model.probes}


def taught(model: LoadedModel, facts: FactProbe, folder: Path, steps: int) -> LoadedModel:
    """A small model of the same tokenizer that has read the fact sentences and nothing else."""
    sentences = folder / "sentences.jsonl"
    sentences.write_text("\n".join(json.dumps({"text": fact.text}) for fact in facts.facts))
    (folder / "tokenizer.json").write_text(model.tokenizer.to_json(), "utf-8")
    base = load_preset("demo")
    config = RunConfig(
        model=replace(base.model, vocab_size=model.config.model.vocab_size),
        data=replace(
            base.data,
            sources=(Source(name="facts", paths=(str(sentences),)),),
            tokenizer=str(folder / "tokenizer.json"),
            row_length=64,
            held_out_fraction=0.1,
            num_slots=1,
        ),
        objective=base.objective,
        optim=replace(base.optim, total_steps=steps, warmup_steps=min(20, steps // 2)),
        train=replace(base.train, batch_rows=32, micro_batch_rows=32),
        fleet=replace(base.fleet, local_steps=steps),
        probe=ProbeConfig(num_rows=1),
    )
    train_alone(folder / "taught", config, steps, report=lambda line: print(line, file=sys.stderr))
    return load(str(folder / "taught"))


def scored(name: str, model: LoadedModel, probes: Probes, facts: FactProbe) -> Scores:
    print(f"probing {name}", file=sys.stderr, flush=True)
    return score(
        name,
        model.denoiser,
        probes,
        specials=model.specials,
        device=model.device,
        decoding_passes=model.config.probe.decoding_passes,
        decode=model.tokenizer.decode_inner,
        facts=facts,
    )


def all_scores(places: list[str], probes: Probes, facts: FactProbe, steps: int) -> Iterator[Scores]:
    first = load(places[0])
    first.denoiser.load_state_dict(initial_weights(first.config))
    yield scored("untrained", first, probes, facts)
    for place in places:
        yield scored(Path(place).name, load(place), probes, facts)
    with tempfile.TemporaryDirectory() as folder:
        control = taught(first, facts, Path(folder), steps)
        # Its rows are 64 tokens long, and it has read no text: only the facts are asked of it.
        yield scored("taught the facts", control, {}, facts)


def record(found: Scores, untrained: Scores) -> dict[str, Any]:
    """Headlines with intervals, what is above the untrained model, and every item in a line."""
    values = found.values()
    against = {} if found is untrained else differences(found, untrained)
    return {
        "model": found.model,
        "figures": {name: plain(interval) for name, interval in own_intervals(found).items()},
        "above_untrained": {name: plain(interval) for name, interval in against.items()},
        "facts": found.facts and found.facts.summary(),
        "items": {name: " ".join(f"{v:.5g}" for v in row) for name, row in values.items()},
    }


def plain(interval: Any) -> dict[str, float]:
    numbers = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: round(number, 5) for name, number in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="folders of `train`")
    parser.add_argument("--quick", action="store_true", help="8 rows a set, 104 facts")
    arguments = parser.parse_args()
    set_threads(None)
    with tempfile.TemporaryDirectory() as folder:
        places = arguments.models or (arguments.quick and [barely_trained(Path(folder))])
        if not places:
            parser.error("name a model, or try it with --quick")
        report("probes", measured(places, quick=arguments.quick), quick=arguments.quick)


def measured(places: list[str], *, quick: bool) -> dict[str, Any]:
    first = load(places[0])
    probes = probes_of(first)
    if quick:
        probes = {name: probe.head(QUICK_ROWS) for name, probe in probes.items()}
    questions = read_questions(SHARED / "facts/popqa_subset.jsonl")
    num_facts = QUICK_FACTS if quick else NUM_FACTS
    facts, left_out = build_fact_probe(questions, first.tokenizer, num_facts=num_facts)
    steps = QUICK_STEPS if quick else CONTROL_STEPS
    scores = list(all_scores(places, probes, facts, steps))
    return {
        "models": [record(found, scores[0]) for found in scores],
        "steps_of_the_taught": steps,
        "probes": {name: {"digest": p.digest, "rows": len(p.ids), "tokens_a_row": p.ids.shape[1]}
                   for name, p in probes.items()},
        "fact_probe": {
            "digest": facts.digest,
            "facts": facts.by_relation(),
            "questions": len(questions),
            "left_out": left_out,
            "choice_by_frequency": choice_by_frequency(facts, questions, first.tokenizer),
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
