"""What a model scores on every probe, and by how much two models differ on the same items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffurefill.config import HELD_OUT, UserError
from diffurefill.decode.canvas import Specials
from diffurefill.evaluate.facts.probe import FactProbe
from diffurefill.evaluate.facts.score import Decode, FactScores, score_facts
from diffurefill.evaluate.probe_sets import Probes
from diffurefill.evaluate.probes import (
    DecodingAccuracy,
    HeldOut,
    decoding_accuracy,
    held_out_ce,
    is_causal,
    row_values,
)
from diffurefill.evaluate.statistics import Interval, bootstrap_mean, paired_difference

Denoiser = Callable[..., Tensor]


@dataclass(frozen=True)
class Scores:
    """Of one model. `sets`: CE by the name of the probe set."""

    model: str
    sets: Mapping[str, HeldOut]
    decoding: DecodingAccuracy | None
    """None for the autoregressive twin, which fills no gaps, and so are `facts`."""
    facts: FactScores | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "sets": {name: found.to_json() for name, found in self.sets.items()},
            "decoding_accuracy": self.decoding and self.decoding.to_json(),
            "facts": self.facts and self.facts.to_json(),
        }

    def brief(self) -> dict[str, Any]:
        """The headlines alone, as JSON."""
        found: dict[str, Any] = {
            "sets": {
                name: {key: value for key, value in one.to_json().items() if key != "rows"}
                for name, one in self.sets.items()
            }
        }
        if self.decoding is not None:
            found["decoding"] = {"token": self.decoding.token, "pair": self.decoding.pair}
        if self.facts is not None:
            found["facts"] = self.facts.brief()
        return found

    def values(self) -> dict[str, list[float]]:
        """Every figure by its name, as values an item whose plain mean is the figure."""
        values = {name: found.row_values() for name, found in self.sets.items()}
        if self.decoding is not None:
            values["token"] = row_values(self.decoding.token_rows)
            values["pair"] = row_values(self.decoding.pair_rows)
        if self.facts is not None:
            values |= {f"fact_{name}": items for name, items in self.facts.values().items()}
        return values


def score(
    name: str,
    denoiser: Denoiser,
    probes: Probes,
    *,
    specials: Specials,
    device: torch.device,
    decoding_passes: int,
    decode: Decode,
    facts: FactProbe | None = None,
) -> Scores:
    """Every figure of one model. Decoding accuracy is of the held-out rows, where they are asked
    for; `decode` turns ids from inside a text into text. Raises UserError where the model gives
    numbers that are not finite."""
    mask_id = specials.mask_id
    sets = {
        set_name: held_out_ce(denoiser, probe, mask_id=mask_id, device=device)
        for set_name, probe in probes.items()
    }
    not_finite = [n for n, found in sets.items() if not found.mean < float("inf")]
    if not_finite:
        raise UserError(
            f"{name}: the CE on {', '.join(not_finite)} is not a finite number: its weights are "
            "damaged, or training had gone astray before they were saved; take earlier ones"
        )
    if is_causal(denoiser):
        return Scores(name, sets, None)
    decoding = found = None
    if HELD_OUT in probes:
        decoding = decoding_accuracy(
            denoiser,
            probes[HELD_OUT],
            specials=specials,
            device=device,
            num_passes=decoding_passes,
        )
    if facts is not None:
        found = score_facts(denoiser, facts, specials=specials, device=device, decode=decode)
    return Scores(name, sets, decoding, found)


def own_intervals(found: Scores) -> dict[str, Interval]:
    """Each figure with its bootstrap interval over rows or facts."""
    return {name: bootstrap_mean(values) for name, values in found.values().items()}


def differences(found: Scores, first: Scores) -> dict[str, Interval]:
    """Each figure of `found` minus that of `first`, item by item, with its bootstrap interval.

    Figures that only one of them has are left out, and CE over other tokens: the autoregressive
    twin scores no token that begins a document. Raises UserError where two probes differ.
    """
    require_same_probes(found, first)
    ours, theirs = found.values(), first.values()
    return {
        name: paired_difference(ours[name], theirs[name])
        for name in ours
        if name in theirs
        and (name not in found.sets or found.sets[name].counts == first.sets[name].counts)
    }


def require_same_probes(found: Scores, first: Scores) -> None:
    """UserError unless the sets that both have are of one version."""
    for name in [name for name in found.sets if name in first.sets]:
        ours, theirs = found.sets[name].probe, first.sets[name].probe
        if ours != theirs:
            raise UserError(
                f"{name} is another probe for {found.model} ({ours}) than for {first.model} "
                f"({theirs}), and figures of two versions are not compared: score both on the "
                "probe file of one (--probe), or only the sets that they share (--set)"
            )
