"""`probe`: the same questions to any number of models, in one table."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from diffurefill.commands.common import progress


@dataclass
class Probe:
    """Fixed questions to one or more models: CE with stored masks, decoding accuracy."""

    models: Positional[tuple[str, ...]]
    """Stores, folders of `train` or `export`, hub ids. All others are compared with the first."""
    set: tuple[str, ...] = ()
    """Probe sets to ask (held_out, short, wiki ...); all that lie with the model by default."""
    probe: Path | None = None
    """A probe file (probe.safetensors) for all models, instead of each one's own."""
    weights: tuple[Literal["global", "ema", "swa"], ...] = ("global", "ema", "swa")
    """Which weights of a run to ask, where it has them."""
    json: bool = False
    """Print every figure, per row too, as JSON."""

    def run(self) -> int:
        from diffurefill.fleet.probing import Asked, score_models

        asked = Asked(self.set, self.probe)
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

    def _print_json(self, scores: list) -> None:
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
