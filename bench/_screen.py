"""The two-stream screen beside the chain rule it stands for, on a small trained model.

On weights that were never trained all choices are nearly alike, and nobody could tell a good screen
from a bad one: the demo preset's model with more layers is trained first. An item is the beginning
of a held-out passage with four continuations, its own and three from elsewhere, of the lengths of
the benchmarks; the best is the one of the highest score a token.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffurefill.config import load_preset
from diffurefill.evaluate.likelihood.scorer import Pair, Scored, Scorer, ScoringModel, score
from diffurefill.evaluate.likelihood.screen import Item
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.loading import LoadedModel, load
from diffurefill.runtime import philox

LAYERS = 4
STEPS, QUICK_STEPS = 1200, 4
ITEMS, QUICK_ITEMS = 100, 8
CHOICES = 4
# name: tokens of context, tokens of each continuation
SHAPES = {"endings": ((40, 80), (15, 35)), "answers": ((20, 45), (2, 6))}
SCORERS = {
    "exact": Scorer(),
    "screened": Scorer(screen="two_stream"),
    "screen_alone": Scorer(screen="two_stream", rescore=0.0),
}


def screen_figures(*, quick: bool) -> dict[str, Any]:
    """{shape: ratios of tokens and CPU seconds, exact over screened, and how often both agree}."""
    with tempfile.TemporaryDirectory() as folder:
        model = trained(Path(folder) / "model", QUICK_STEPS if quick else STEPS)
        device, length = model.device, model.config.data.row_length
        scoring = ScoringModel(model.denoiser.eval(), model.specials, length, device)
        shapes = {
            name: compare(scoring, *items(model, name, QUICK_ITEMS if quick else ITEMS))
            for name in SHAPES
        }
    parameters = sum(p.numel() for p in model.denoiser.parameters())
    steps = QUICK_STEPS if quick else STEPS
    facts = {"layers": LAYERS, "parameters": parameters, "steps": steps}
    return {"model": facts, "rescore": SCORERS["screened"].rescore, "shapes": shapes}


def trained(folder: Path, steps: int) -> LoadedModel:
    demo = load_preset("demo")
    config = replace(
        demo,
        model=replace(demo.model, layers=LAYERS),
        optim=replace(demo.optim, total_steps=steps, warmup_steps=min(20, steps // 2)),
        fleet=replace(demo.fleet, local_steps=steps),
        probe=replace(demo.probe, num_rows=256),
    )
    train_alone(folder, config, steps, report=lambda line: print(line, file=sys.stderr))
    return load(str(folder))


def items(model: LoadedModel, name: str, count: int) -> tuple[list[Pair], list[Item]]:
    context_lengths, lengths = SHAPES[name]
    rng = philox("bench screen", name)
    ids, doc_ids = model.probe.ids, model.probe.doc_ids

    def passage(num_tokens: int) -> list[int]:
        """Of one document; by chance where."""
        while True:
            row, start = rng.integers(len(ids)), rng.integers(ids.shape[1] - num_tokens)
            documents = doc_ids[row, start : start + num_tokens]
            if documents[0] >= 0 and (documents == documents[0]).all():
                return ids[row, start : start + num_tokens].tolist()

    pairs: list[Pair] = []
    found: list[Item] = []
    for _ in range(count):
        P = int(rng.integers(*context_lengths, endpoint=True))
        sizes = [int(n) for n in rng.integers(*lengths, CHOICES, endpoint=True)]
        whole = passage(P + sizes[0])
        continuations = [whole[P:], *(passage(n) for n in sizes[1:])]
        places = range(len(pairs), len(pairs) + CHOICES)
        found.append(Item(tuple(places), tuple(sizes)))
        pairs += [(whole[:P], continuation) for continuation in continuations]
    return pairs, found


def compare(model: ScoringModel, pairs: list[Pair], found: list[Item]) -> dict[str, Any]:
    scored: dict[str, Scored] = {}
    seconds: dict[str, float] = {}
    for name, scorer in SCORERS.items():
        start = time.process_time()
        scored[name] = score(model, pairs, scorer, items=found)
        seconds[name] = time.process_time() - start
    a_token = {
        name: np.array([one.log_likelihood for one in each.scores]).reshape(-1, CHOICES)
        / np.array([item.lengths for item in found])
        for name, each in scored.items()
    }
    best = {name: values.argmax(axis=1) for name, values in a_token.items()}
    cost = {name: each.cost.forward_tokens for name, each in scored.items()}
    return {
        "items": len(found),
        "forward_token_ratio": round(cost["exact"] / cost["screened"], 3),
        "time_ratio": round(seconds["exact"] / seconds["screened"], 3),
        "forward_token_ratio_alone": round(cost["exact"] / cost["screen_alone"], 3),
        "time_ratio_alone": round(seconds["exact"] / seconds["screen_alone"], 3),
        "same_best": float((best["exact"] == best["screened"]).mean()),
        "same_best_alone": float((best["exact"] == best["screen_alone"]).mean()),
        "own_is_best": float((best["exact"] == 0).mean()),
        "approximate": len(scored["screened"].approximate) / len(pairs),
        "difference_a_token": round(
            float(np.abs(a_token["exact"] - a_token["screen_alone"]).mean()), 4
        ),
    }
