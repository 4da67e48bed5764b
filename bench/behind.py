"""Does a scored continuation want room behind it? What a model of whole documents says at its end.

    python bench/behind.py [--quick]

A small denoiser is trained on documents of a few sentences in which one person does things with one
object: who has read a sentence knows the last word of the next. It is trained twice, on rows of
whole documents (`best_fit`, the default) and on documents cut where rows end (`chop`). Then it is
asked, by the chain rule, for that last word of a sentence that more may follow, with more and more
MASKs behind it. `right`: share of items whose word is the model's first choice (LAMBADA's figure).
`nats`: of the word. --quick: few steps of training, prints only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from _common import report
from diffurefill.config import ModelConfig, ProbeConfig, RunConfig, Source, load_preset
from diffurefill.evaluate.likelihood.scorer import Pair, Scorer, ScoringModel, score
from diffurefill.evaluate.statistics import proportion
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.loading import LoadedModel, load
from diffurefill.runtime import philox, set_threads

PEOPLE = ["Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo"]
DOES = ["sees", "takes", "finds", "wants", "likes", "has", "keeps", "sells", "buys", "draws"]
THINGS = ["a ball", "a bell", "a boat", "a book", "a cake", "a drum", "a fish", "a hat", "a kite"]
PACKINGS = ("best_fit", "chop")
BEHIND = (0, 1, 2, 4, 8)
DOCUMENTS, STEPS, ITEMS, ROW_LENGTH = 20_000, 400, 200, 64
QUICK_STEPS, QUICK_ITEMS = 4, 16


def sentence(rng: np.random.Generator, who: str, what: str) -> str:
    return f"{who} {rng.choice(DOES)} {what}."


def document(rng: np.random.Generator) -> str:
    who, what = rng.choice(PEOPLE), rng.choice(THINGS)
    return " ".join(sentence(rng, who, what) for _ in range(rng.integers(2, 7)))


def config_of(corpus: Path, packing: str, steps: int) -> RunConfig:
    demo = load_preset("demo")
    return replace(
        demo,
        model=ModelConfig(vocab_size=512, width=64, layers=2, heads=2, ffn_width=192),
        data=replace(
            demo.data,
            sources=(Source(paths=(str(corpus),)),),
            tokenizer_pieces=448,
            row_length=ROW_LENGTH,
            packing=packing,
            num_slots=1,
        ),
        optim=replace(demo.optim, total_steps=steps, warmup_steps=min(20, steps // 2)),
        fleet=replace(demo.fleet, local_steps=steps),
        train=replace(demo.train, batch_rows=32, micro_batch_rows=32),
        probe=ProbeConfig(num_rows=4),
    )


def items(model: LoadedModel, count: int) -> list[Pair]:
    """Some sentences of a document and the next without its last word; that word."""
    rng, pairs = philox("bench behind"), []
    for _ in range(count):
        who, what = rng.choice(PEOPLE), rng.choice(THINGS)
        before = " ".join(sentence(rng, who, what) for _ in range(rng.integers(1, 4)))
        *start, last = sentence(rng, who, what).removesuffix(".").split(" ")
        context = model.tokenizer.encode(f"{before} {' '.join(start)}")
        whole = model.tokenizer.encode(f"{before} {' '.join(start)} {last}")
        assert whole[: len(context)] == context
        pairs.append((context, whole[len(context) :]))
    return pairs


def asked(model: LoadedModel, pairs: list[Pair]) -> dict[str, Any]:
    scoring = ScoringModel(model.denoiser.eval(), model.specials, ROW_LENGTH, model.device)
    found = {}
    for behind in BEHIND:
        scores = score(scoring, pairs, Scorer(right_masks=behind)).scores
        right = proportion(sum(one.is_greedy for one in scores), len(scores))
        nats = -float(np.mean([one.log_likelihood for one in scores]))
        found[str(behind)] = {"right": right.to_json(), "nats": round(nats, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps of training")
    quick = parser.parse_args().quick
    set_threads(1)
    steps, count = (QUICK_STEPS, QUICK_ITEMS) if quick else (STEPS, ITEMS)
    rng, figures = philox("bench behind", "documents"), {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        lines = (json.dumps({"text": document(rng)}) for _ in range(DOCUMENTS))
        corpus.write_text("\n".join(lines) + "\n", "utf-8")
        for packing in PACKINGS:
            place = Path(folder) / packing
            config = config_of(corpus, packing, steps)
            train_alone(place, config, steps, lambda line: print(line, file=sys.stderr))
            model = load(str(place))
            figures[packing] = asked(model, items(model, count))
    sizes = {"parameters": sum(p.numel() for p in model.denoiser.parameters()), "steps": steps}
    report("behind", {**sizes, "items": count, "packings": figures}, quick=quick)


if __name__ == "__main__":
    main()
