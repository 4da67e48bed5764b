"""The merger's guard: held-out CE of a global before anybody trains on it (spec fleet.md 5.3)."""

from __future__ import annotations

from pathlib import Path

from diffurefill.config import RunConfig
from diffurefill.evaluate.probes import Probe, held_out_ce
from diffurefill.model.denoiser import Denoiser
from diffurefill.runtime import default_device
from diffurefill.train.checkpoint import load_weights


class ProbeGuard:
    """See averager.Guard. Scores the first `fleet.guard_rows` rows of the run's probe."""

    def __init__(self, config: RunConfig, probe: Probe, mask_id: int) -> None:
        self._device, self._mask_id = default_device(), mask_id
        self._probe = probe.head(config.fleet.guard_rows)
        self._denoiser = Denoiser(config.model).to(self._device).eval()

    def scores(self, weights: Path) -> list[float]:
        self._denoiser.load_state_dict(load_weights(weights))
        found = held_out_ce(self._denoiser, self._probe, mask_id=self._mask_id, device=self._device)
        return found.row_means()
