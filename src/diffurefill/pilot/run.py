"""The pilot from two models to a result: every arm written, judged, and compared in pairs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diffurefill.config import RunConfig, Stage
from diffurefill.copies import local_copies
from diffurefill.evaluate.judge import Judge, Score, open_judge
from diffurefill.evaluate.judged import Judged, judged, judged_json
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.found import find
from diffurefill.fleet.loading import LoadedModel, build
from diffurefill.pilot.arms import Arm, choose_arms, pilot_arms
from diffurefill.pilot.passages import held_out_passages
from diffurefill.pilot.writing import Pair, Task, Written, written
from diffurefill.runtime import without_folders
from diffurefill.store.durable import write_file

AGAINST = ("draft", "ar", "tuned")
"""Every other arm is compared with these."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked of the pilot."""

    tuned: tuple[Stage, ...]
    arms: tuple[str, ...] = ()
    """Names of the arms to run; all where empty."""
    num_prompts: int = 256
    skip_prompts: int = 0
    prompt_tokens: int = 32
    num_tokens: int = 128
    batch_rows: int = 32
    seed: int = 0


def train_pair(
    folder: Path, config: RunConfig, steps: int | None, say: Callable[[str], None]
) -> tuple[str, str]:
    """A denoiser and its twin, trained on the same rows in the same order; continued where they
    were interrupted. Returns their folders."""
    places = []
    for name, causal in (("diffusion", False), ("ar", True)):
        place = folder / name
        say(f"training {name}")
        train_alone(place, one_of_pair(config, causal=causal), steps, say)
        places.append(str(place))
    return places[0], places[1]


def one_of_pair(config: RunConfig, *, causal: bool) -> RunConfig:
    """`config` of the denoiser or of its twin, which masks nothing and so has no draft to mend."""
    objective = replace(config.objective, self_repair=0.0) if causal else config.objective
    model = replace(config.model, causal=causal)
    return replace(config, model=model, objective=objective)


def run_pilot(
    folder: Path,
    places: tuple[str, str | None],
    plan: Plan,
    judge: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The figures of every arm, read by `judge`. What `folder` holds of an interrupted run is used
    again. `places`: of the denoiser, and of its twin where an arm asks for it."""
    arms = choose_arms(pilot_arms(plan.tuned), plan.arms, has_twin=places[1] is not None)
    opened = [_open(place) for place in places if place is not None]
    origins = [origin for _, origin in opened]
    pair = Pair(opened[0][0], opened[1][0] if len(opened) > 1 else None)
    passages = held_out_passages(
        pair.diffusion.config.data,
        pair.diffusion.tokenizer,
        num_passages=plan.num_prompts,
        skip=plan.skip_prompts,
        prompt_tokens=plan.prompt_tokens,
        num_tokens=plan.num_tokens,
    )
    task = Task(passages, plan.num_tokens, plan.seed, plan.batch_rows)
    prompts = [pair.diffusion.tokenizer.decode(passage.prompt) for passage in passages]
    reader = Reader(folder / "scores", prompts, judge)
    texts: dict[str, Written] = {}
    rows: dict[str, Judged] = {}
    for arm in arms:  # each judged at once: a judge that cannot be opened is told early
        texts[arm.name] = written(folder / "arms", arm, pair, task, say)
        rows[arm.name] = _judged(arm, texts[arm.name], reader, say)
    against = {name: rows[name] for name in AGAINST if name in rows}
    return {
        "judge": without_folders(reader.name),
        "models": {
            name: _model_facts(model, origin, pair.digests[name])
            for (name, model), origin in zip(pair.models.items(), origins, strict=True)
        },
        "num_prompts": len(passages),
        "skip_prompts": plan.skip_prompts,
        "prompt_tokens": plan.prompt_tokens,
        "num_tokens": plan.num_tokens,
        "seed": plan.seed,
        "arms": {
            arm.name: {**judged_json(rows[arm.name], against), "how": _how(arm)} for arm in arms
        },
        "examples": {
            arm.name: [
                f"{prompt} |{text}"
                for prompt, text in zip(prompts[:2], texts[arm.name].texts[:2], strict=True)
            ]
            for arm in arms
        },
    }


class Reader:
    """The judge, opened only when something is to be read; scores are kept on disk."""

    def __init__(self, folder: Path, prompts: Sequence[str], name: str) -> None:
        self.name, self._folder, self._prompts = name, folder, prompts

    @cached_property
    def judge(self) -> Judge:
        return open_judge(self.name)

    def score(self, arm: str, samples: Written) -> list[Score]:
        prompts = hashlib.sha256(json.dumps(self._prompts).encode()).hexdigest()[:16]
        path, key = self._folder / f"{arm}.json", [self.name, samples.digest, prompts]
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
            if found["key"] == key:
                return [Score(*score) for score in found["scores"]]
        scores = self.judge.score(self._prompts, samples.texts)
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {"key": key, "scores": [[score.nll, score.num_tokens] for score in scores]}
        write_file(path, json.dumps(record).encode())
        return scores


def _judged(arm: Arm, samples: Written, reader: Reader, say: Callable[[str], None]) -> Judged:
    scores = reader.score(arm.name, samples)
    row = judged(arm.title, samples.num_forward_passes, samples.samples, samples.texts, scores)
    say(f"{arm.title}: judge NLL {row.interval('nll').mean:.3f}, "
        f"doubled {row.statistics.doubled_tokens:.2%}, "
        f"distinct-2 {row.statistics.distinct_2:.3f}")  # fmt: skip
    return row


def _how(arm: Arm) -> dict[str, Any]:
    return {k: v for k, v in arm.to_json().items() if k not in ("name", "title")}


def _open(place: str) -> tuple[LoadedModel, dict[str, Any]]:
    """The model at `place`, and where it comes from."""
    with local_copies() as cache:
        found = find(place, None, cache)
        return build(found), found.provenance


def _model_facts(model: LoadedModel, origin: dict[str, Any], digest: str) -> dict[str, Any]:
    config = model.config
    return {
        "origin": origin,
        "parameters": sum(p.numel() for p in model.denoiser.parameters()),
        "weights": digest,
        "held_out_ce": model.held_out().mean if model.probes else None,
        "row_length": config.data.row_length,
        "batch_rows": config.train.batch_rows,
        "sources": [source.name for source in config.data.sources],
        "model": {k: getattr(config.model, k) for k in ("vocab_size", "width", "layers", "heads")},
    }
