"""The torch side of a worker: a Trainer that adopts globals, with the probes around each merge."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from diffurefill.data.packing import Position
from diffurefill.evaluate.probes import Probe, held_out_ce
from diffurefill.fleet.adoption import keep_drift
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.codec import encode_delta
from diffurefill.fleet.records import Cursor, State
from diffurefill.runtime import device_name
from diffurefill.train.checkpoint import load_weights, save_weights
from diffurefill.train.loop import Trainer

PROBE_ROWS = 16
"""Rows of the probe that a worker scores: adoption and drift are differences of large numbers on
the same rows, so few rows suffice, and they cost a worker little."""


class TrainingLearner:
    """See worker.Learner. One optimiser serves all intervals: moments survive every adoption."""

    def __init__(self, trainer: Trainer, probe: Probe) -> None:
        fleet = trainer.config.fleet
        self._trainer, self._probe = trainer, probe.head(PROBE_ROWS)
        self._keeps_drift = fleet.adoption == "keep_drift"
        self.codec = fleet.codec
        self.machine = device_name(trainer.device)
        self._pushed: Path | None = None
        """The weights as they were pushed: what drift is counted from."""
        self._adopted_ce = float("nan")
        self._trained_ce: float | None = None
        """CE of the weights as the last interval left them; None until one was completed."""

    def adopt(self, weights: Path, state: State, ahead: int) -> dict[str, Any]:
        """Logs `adoption`: CE after loading the global minus CE before, after a full interval."""
        before, self._trained_ce = self._trained_ce, None
        trainer = self._trainer
        if ahead and self._pushed is not None:
            keep_drift(trainer.parameters(), self._pushed, weights)
            trainer.step = state.step + ahead
        else:
            trainer.load_weights(load_weights(weights), step=state.step)
            cursor = state.cursor(trainer.slot)
            trainer.seek(Position.from_json(cursor) if cursor else None)
        self._adopted_ce = self._ce()
        facts = {"held_out_ce": self._adopted_ce, "ahead": ahead}
        return facts if before is None else {**facts, "adoption": self._adopted_ce - before}

    def step(self, local_step: int) -> dict[str, Any]:
        return {**self._trainer.take_step().metrics(), "step": self._trainer.step}

    def reset(self) -> None:
        self._trainer.reset_optimizer()

    def cursor(self) -> Cursor:
        """A session that ends early stops inside an interval, so rows count as well."""
        position = self._trainer.position
        assert position is not None, "no step was taken"
        return position.to_json()

    def save_delta(self, base: Path, dest: Path) -> float:
        weights = self._trainer.parameters()
        if self._keeps_drift:
            self._pushed = dest.with_name("pushed.weights")
            save_weights(self._pushed, self._trainer.weights())
        return encode_delta(base, weights, dest, codec=self.codec)

    def apply_update(self, base: Path, update: Path, dest: Path) -> None:
        FileAverager().apply_update(base, update, dest)

    def finish(self) -> dict[str, Any]:
        """Speed of the interval; drift: how far its steps moved the probe before the merge. Memory
        in MB."""
        facts = self._trainer.take_metrics()
        self._trained_ce = self._ce()
        drift = self._trained_ce - self._adopted_ce
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        return {"drift": drift, **facts, "peak_mb": peak, **self._gpu_memory()}

    def _gpu_memory(self) -> dict[str, float]:
        """The most that tensors have held on a GPU, which peak_mb says nothing of."""
        device = self._trainer.device
        if device.type != "cuda":
            return {}
        return {"gpu_peak_mb": torch.cuda.max_memory_allocated(device) / 1e6}

    def _ce(self) -> float:
        trainer = self._trainer
        mask_id = trainer.tokenizer.mask_id
        return held_out_ce(trainer.model, self._probe, mask_id=mask_id, device=trainer.device).mean
