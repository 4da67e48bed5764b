"""`probe`: the same questions to any number of models, in one table."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from diffurefill.commands.common import progress, say
from diffurefill.config import UserError

if TYPE_CHECKING:
    from diffurefill.evaluate.scores import Scores
    from diffurefill.fleet.probing import Asked


@dataclass
class Probe:
    """Fixed questions to one or more models: CE with stored masks, decoding accuracy, facts."""

    models: Positional[tuple[str, ...]]
    """Stores, folders of `train` or `export`, hub ids. All others are compared with the first."""
    set: tuple[str, ...] = ()
    """Probe sets to ask, such as held_out,short,wiki; all that lie with the model by default."""
    probe: Path | None = None
    """A probe file (probe.safetensors) for all models, instead of each one's own."""
    facts: Path | None = None
    """A fact probe, made by `diffurefill probe facts`."""
    weights: tuple[str, ...] = ("global", "ema", "swa")
    """Which weights of a run to ask, where it has them: global, ema, swa, last-3 ..."""
    json: bool = False
    """Print every figure, per row too, as JSON."""
    follow: bool = False
    """Probe every generation of one run, those that are there and then each that is published,
    without ever writing to the store. Needs --log."""
    log: Path | None = None
    """With --follow: the JSONL file to write, and to go on with after an interruption."""
    until: int | None = None
    """With --follow: stop once this generation is probed."""

    def run(self) -> int:
        from diffurefill.fleet.probing import Asked, score_models

        sets = [name for part in self.set for name in part.split(",")]
        asked = Asked(sets, self.probe, self.facts)
        if self.follow or self.log is not None or self.until is not None:
            return self._follow(asked)
        scores = []
        for found in score_models(self.models, asked, self.weights):
            progress(f"probed {found.model}")
            scores.append(found)
        progress("")
        if self.json:
            self._print_json(scores)
        else:
            from rich.console import Console

            from diffurefill.commands.probe_tables import score_tables

            Console().print(*score_tables(scores))
        return 0

    def _follow(self, asked: Asked) -> int:
        from diffurefill.fleet.probing import follow_run
        from diffurefill.runtime import require_writable

        if not self.follow or self.log is None or len(self.models) != 1 or self.json:
            raise UserError("to probe a run from the side: probe STORE --follow --log FILE")
        require_writable(self.log)
        follow_run(self.models[0], self.log, asked, self.weights, self.until, say)
        return 0

    def _print_json(self, scores: list[Scores]) -> None:
        import json

        from diffurefill.evaluate.scores import differences

        records = [
            {
                **found.to_json(),
                "against_first": {n: d.to_json() for n, d in differences(found, scores[0]).items()},
            }
            for found in scores
        ]
        json.dump(records, sys.stdout)
        print()


@dataclass(kw_only=True)
class ProbeFacts:
    """Make the fact probe of a tokenizer from PopQA: sentences, answers, wrong answers."""

    questions: Annotated[Path, tyro.conf.arg(name="from")]
    """PopQA's popQA.tsv (github.com/AlexTMallen/adaptive-retrieval), or JSONL with its columns."""
    to: Path
    """The fact probe to write, JSONL."""
    tokenizer: str
    """A run's store, a model's folder, or a tokenizer as data.tokenizer names it."""
    num_facts: int = 1050
    """As many from each relation as there are, up to an equal share."""
    seed: int = 0
    """Of the choice of facts and of wrong answers."""

    def run(self) -> int:
        from diffurefill.evaluate.facts.build import build_fact_probe, choice_by_frequency
        from diffurefill.evaluate.facts.popqa import read_questions
        from diffurefill.fleet.probing import tokenizer_at
        from diffurefill.runtime import require_writable

        require_writable(self.to)
        questions = read_questions(self.questions)
        tokenizer = tokenizer_at(self.tokenizer)
        probe, left_out = build_fact_probe(
            questions, tokenizer, num_facts=self.num_facts, seed=self.seed
        )
        by_frequency = choice_by_frequency(probe, questions, tokenizer)
        about = {"source": self.questions.name, "questions": len(questions), "seed": self.seed}
        probe.save(self.to, {**about, "left_out": left_out, "choice_by_frequency": by_frequency})
        relations = ", ".join(f"{name} {count}" for name, count in probe.by_relation().items())
        say(f"facts: {relations}")
        say(f"left out: {', '.join(f'{n} {k}' for n, k in left_out.items())}")
        say(f"choice by the frequency of answers alone: {by_frequency['all']:.1%}, by chance 25%")
        say(f"{len(probe.facts):,} facts in {self.to}, version {probe.digest}")
        return 0
