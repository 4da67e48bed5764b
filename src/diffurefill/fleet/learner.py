"""The torch side of a worker: a Trainer that adopts globals, with the probes around each merge."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

from diffurefill.data.documents import Cursor
from diffurefill.data.loader import Position
from diffurefill.evaluate.probes import Probe, held_out_ce
from diffurefill.fleet.codec import CODEC, encode_delta, inspect_delta
from diffurefill.fleet.protocol import State
from diffurefill.runtime import machine_facts
from diffurefill.train.checkpoint import load_weights, schema
from diffurefill.train.loop import Trainer

PROBE_ROWS = 16
"""Rows of the probe that a worker scores: adoption and drift are differences of large numbers on
the same rows, so few rows suffice, and they cost a worker little."""


class TrainingLearner:
    """See worker.Learner. One optimiser serves all intervals: moments survive every adoption."""

    codec = CODEC

    def __init__(self, trainer: Trainer, probe: Probe) -> None:
        self._trainer, self._probe = trainer, probe.head(PROBE_ROWS)
        self.machine = str(machine_facts()["device"])
        self._adopted_ce = float("nan")
        self._trained_ce: float | None = None
        """CE of the weights as the last interval left them; None until one was completed."""

    def adopt(self, weights: Path, state: State) -> dict[str, Any]:
        """Logs `adoption`: CE after loading the global minus CE before, after a full interval."""
        before, self._trained_ce = self._trained_ce, None
        self._trainer.load_weights(load_weights(weights), step=state.step)
        cursor = state.cursor(self._trainer.slot)
        start = Position(cursor=Cursor.from_json(cursor), num_rows=0) if cursor else None
        self._trainer.seek(start)
        self._adopted_ce = self._ce()
        facts = {"held_out_ce": self._adopted_ce}
        return facts if before is None else {**facts, "adoption": self._adopted_ce - before}

    def step(self, local_step: int) -> dict[str, Any]:
        began = time.perf_counter()
        metrics = self._trainer.take_step().metrics()
        rate = metrics["tokens"] / max(time.perf_counter() - began, 1e-9)
        return {**metrics, "step": self._trainer.step, "tokens_per_second": rate}

    def reset(self) -> None:
        self._trainer.reset_optimizer()

    def cursor(self) -> dict[str, int]:
        position = self._trainer.position
        assert position is not None, "no step was taken"
        assert position.num_rows == 0, "only at an interval's end is the cursor the position"
        return position.cursor.to_json()

    def save_delta(self, base: Path, dest: Path) -> float:
        encode_delta(base, self._trainer.weights(), dest)
        facts = inspect_delta(dest, schema(base))
        return facts.norm if facts.finite else float("nan")

    def finish(self) -> dict[str, Any]:
        """Drift: how far the local steps moved the probe before the merge. Memory in MB."""
        self._trained_ce = self._ce()
        drift = self._trained_ce - self._adopted_ce
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"drift": drift, **self._trainer.take_metrics(), "peak_mb": peak}

    def _ce(self) -> float:
        trainer = self._trainer
        mask_id = trainer.tokenizer.mask_id
        return held_out_ce(trainer.model, self._probe, mask_id=mask_id, device=trainer.device).mean
