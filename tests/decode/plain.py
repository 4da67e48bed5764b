"""Decoding as the specification tells it, one row and one position at a time: slow and plain.

`generate` must give the same ids; the two share the denoiser and the keyed uniforms, nothing else.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from diffurefill.config import Stage
from diffurefill.decode.canvas import Specials
from diffurefill.runtime import philox
from tests.fakes import BOS, EOS, MASK, PAD

V = 24


def specials(vocab_size: int = V) -> Specials:
    """The fakes' ids; the last id stands for an unused row of a padded vocabulary."""
    emittable = np.ones(vocab_size, dtype=bool)
    emittable[[BOS, MASK, PAD, -1]] = False
    return Specials(BOS, EOS, MASK, PAD, emittable)


def greedy_gap(score: dict[int, float], quota: int, gap: int) -> list[int]:
    """Positions by falling score, ties by position, none closer than `gap` to one taken before."""
    taken: list[int] = []
    for i in sorted(score, key=lambda i: (-score[i], i)):
        if len(taken) < quota and all(abs(i - j) >= gap for j in taken):
            taken.append(i)
    return taken


def draw(
    logits: np.ndarray,
    neighbours: set[int],
    u: float,
    temperature: float,
    stage: Stage,
    allowed: np.ndarray,
) -> tuple[int, float]:
    """One token and its log p1, from float64 logits (V,)."""
    clean = np.where(allowed, logits.astype(np.float64), -np.inf)
    log_p1 = clean - np.log(np.exp(clean - clean.max()).sum()) - clean.max()
    banned = clean.copy()
    for token in neighbours:
        banned[token] -= stage.neighbour_ban
    if temperature == 0:
        token = int(banned.argmax())
        return token, log_p1[token]
    p = np.exp((banned - banned.max()) / temperature)
    p[p / p.sum() < stage.min_p * (p / p.sum()).max()] = 0.0
    token = int(np.searchsorted(np.cumsum(p) / p.sum(), u, side="right"))
    return token, log_p1[token]


class PlainRow:
    """One row being decoded; `passes` holds the accepted positions of every pass."""

    def __init__(
        self,
        denoiser: nn.Module,
        ids: list[int],
        fillable: list[bool],
        allowed: np.ndarray,
        seed: int,
    ) -> None:
        self.denoiser, self.ids, self.seed, self.allowed = denoiser, list(ids), seed, allowed
        self.slots = [i for i, open_ in enumerate(fillable) if open_]
        self.confidence: dict[int, float] = {}
        self.passes: list[list[int]] = []

    def run(self, stages: tuple[Stage, ...]) -> list[int]:
        for s, stage in enumerate(stages):
            k = 0
            while k < stage.num_passes or stage.num_passes == 0:
                masked = [i for i in self.slots if self.ids[i] == MASK]
                if stage.remask_fraction > 0:
                    masked = self.remask(stage)
                if not masked:
                    break
                self.one_pass(stage, s, k, masked)
                k += 1
        return self.ids

    def remask(self, stage: Stage) -> list[int]:
        m = max(1, round(stage.remask_fraction * len(self.slots)))
        unsure = {i: -self.confidence[i] for i in self.slots}
        chosen = greedy_gap(unsure, m, stage.commit_gap)
        for i in chosen:
            self.ids[i] = MASK
        return sorted(chosen)

    def one_pass(self, stage: Stage, s: int, k: int, masked: list[int]) -> None:
        logits = self.denoiser(torch.tensor([self.ids]))[0].numpy()
        T, n = len(self.ids), len(self.slots)
        uniform = philox(self.seed, "sample", s, k).random(T)
        gumbel = -np.log(-np.log(philox(self.seed, "order", s, k).random(T)))
        K = stage.num_passes or math.ceil(n / (stage.tokens_per_pass or 1))
        first, last = stage.temperature
        temperature = first + (last - first) * min(1.0, k / (K - 1)) if K > 1 else last
        tau = stage.order_noise * max(0.0, 1 - (k + 1) / K)

        def draw_at(i: int) -> tuple[int, float]:
            beside = {self.ids[j] for j in (i - 1, i + 1) if 0 <= j < T} - {MASK, PAD}
            return draw(logits[i], beside, uniform[i], temperature, stage, self.allowed)

        drawn = {i: draw_at(i) for i in masked}
        score = {i: drawn[i][1] + tau * gumbel[i] for i in masked}
        if stage.order == "left_to_right":
            score = {i: -float(i) for i in masked}
        if stage.remask_fraction > 0:
            chosen, waived = masked, []
        elif k == stage.num_passes - 1:
            chosen = greedy_gap(score, n, stage.commit_gap)
            waived = [i for i in sorted(score, key=lambda i: (-score[i], i)) if i not in chosen]
        else:
            chosen, waived = greedy_gap(score, self.quota(stage, k, masked), stage.commit_gap), []
        for i in chosen:
            self.ids[i], self.confidence[i] = drawn[i]
        for i in waived:
            self.ids[i], self.confidence[i] = draw_at(i)
        self.passes.append(sorted([*chosen, *waived]))

    def quota(self, stage: Stage, k: int, masked: list[int]) -> int:
        if stage.tokens_per_pass:
            return stage.tokens_per_pass
        done = (k + 1) / stage.num_passes
        gamma = math.cos(math.pi / 2 * done) if stage.quota == "cosine" else 1 - done
        return max(1, len(masked) - math.floor(len(self.slots) * gamma + 1e-9))


def plain_generate(
    denoiser: nn.Module, ids: Tensor, fillable: Tensor, stages: tuple[Stage, ...], seed: int
) -> list[int]:
    """The decoded row (T,) of ids and fillable (T,)."""
    allowed = np.asarray(specials().emittable)
    return PlainRow(denoiser, ids.tolist(), fillable.tolist(), allowed, seed).run(stages)
