"""Decoding as the specification tells it, one row and one position at a time: slow and plain.

`generate` must give the same ids; the two share the denoiser and the keyed uniforms, nothing else.
"""

from __future__ import annotations

import math
from copy import copy

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


def walk(score: dict[int, float]) -> list[int]:
    """Positions by falling score, ties by position."""
    return sorted(score, key=lambda i: (-score[i], i))


def greedy_gap(score: dict[int, float], quota: int, gap: int) -> list[int]:
    """The first `quota` of the walk, none closer than `gap` to one taken before."""
    taken: list[int] = []
    for i in walk(score):
        if len(taken) < quota and all(abs(i - j) >= gap for j in taken):
            taken.append(i)
    return taken


def runs(positions: list[int]) -> list[list[int]]:
    """Neighbouring positions together."""
    found: list[list[int]] = []
    for i in sorted(positions):
        if found and found[-1][-1] == i - 1:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def plain_accept(
    stage: Stage, score: dict[int, float], quota: int, p: dict[int, float], H: dict[int, float]
) -> list[int]:
    """What a draft pass accepts; p and H: probability of the drawn token and entropy."""
    gap, everything = stage.commit_gap, len(score)
    if stage.quota == "threshold":
        sure = {i: x for i, x in score.items() if p[i] > stage.bound}
        return greedy_gap(sure or score, everything if sure else 1, gap)
    if stage.quota == "one_per_run":
        best = {min(run, key=lambda i: (-score[i], i)) for run in runs(list(score))}
        return greedy_gap({i: score[i] for i in best}, everything, gap)
    spaced = greedy_gap(score, everything, gap)
    if stage.quota in ("factor", "entropy_bound"):
        n = 1
        while n < len(spaced):
            if stage.quota == "factor":
                cost = (n + 2) * (1 - p[spaced[n]])
            else:
                some = [H[i] for i in spaced[: n + 1]]
                cost = sum(some) - max(some)
            if cost > stage.bound:
                break
            n += 1
        return spaced[:n]
    return spaced[:quota]


def log_softmax(logits: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    clean = np.where(allowed, logits.astype(np.float64), -np.inf)
    return clean - np.log(np.exp(clean - clean.max()).sum()) - clean.max()


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
    log_p1 = log_softmax(logits, allowed)
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
        min_tokens: int = 0,
    ) -> None:
        self.denoiser, self.ids, self.seed = denoiser, list(ids), seed
        self.everywhere = self.slots = [i for i, open_ in enumerate(fillable) if open_]
        self.allowed = {i: allowed.copy() for i in self.slots}
        for i in self.slots[:min_tokens]:
            self.allowed[i][EOS] = False
        self.block: tuple[str | int, ...] = ()
        self.confidence: dict[int, float] = {}
        self.passes: list[list[int]] = []

    def run(self, stages: tuple[Stage, ...], block_length: int) -> list[int]:
        length = block_length or len(self.everywhere)
        for j, first in enumerate(range(0, len(self.everywhere), length)):
            self.slots = self.everywhere[first : first + length]
            self.block = ("block", j) if j else ()
            self.run_block(stages)
        return self.ids

    def run_block(self, stages: tuple[Stage, ...]) -> None:
        for s, stage in enumerate(stages):
            k, self.times = 0, dict.fromkeys(self.slots, 0)
            while k < stage.num_passes or (stage.num_passes == 0 and not stage.refills):
                before = list(self.ids)
                masked = [i for i in self.slots if self.ids[i] == MASK]
                if stage.refills:
                    masked = self.remask(stage, s, k)
                if not masked:
                    break
                self.one_pass(stage, s, k, masked)
                k += 1
                if stage.stop_unchanged and self.ids == before:
                    break

    def random(self, use: str, s: int, k: int) -> np.ndarray:
        return philox(self.seed, use, s, k, *self.block).random(len(self.ids))

    def logits(self, ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.denoiser(torch.tensor([ids]))[0].float().numpy()

    def gumbel(self, s: int, k: int) -> np.ndarray:
        return -np.log(-np.log(self.random("order", s, k)))

    def regroup(self, groups: int) -> None:
        """Every token's log p1 anew, a group of them masked at a time."""
        for g in range(groups):
            hidden = self.slots[g::groups]
            ids = [MASK if i in hidden else token for i, token in enumerate(self.ids)]
            logits = self.logits(ids)
            for i in hidden:
                self.confidence[i] = log_softmax(logits[i], self.allowed[i])[self.ids[i]]

    def shadow(self, judged: list[int]) -> None:
        """The log p1 of each of `judged` anew, with it alone masked beside what is masked now."""
        for i in judged:
            ids = [MASK if i == j else token for j, token in enumerate(self.ids)]
            logits = self.logits(ids)
            self.confidence[i] = log_softmax(logits[i], self.allowed[i])[self.ids[i]]

    def remask(self, stage: Stage, s: int, k: int) -> list[int]:
        m = max(1, round(stage.remask_fraction * len(self.slots)))
        gumbel = self.gumbel(s, k)
        known = copy(self.confidence)
        if stage.confidence == "regrouped":
            self.regroup(stage.groups)
        unsure = {i: -self.confidence[i] for i in self.slots}
        if stage.order == "random":
            unsure = {i: np.float32(gumbel[i]) for i in self.slots}
        for i in self.slots:
            worn = stage.remask_cap is not None and self.times[i] >= stage.remask_cap
            if worn or self.confidence[i] >= math.log(stage.sure_above or math.inf):
                del unsure[i]
        chosen = greedy_gap(unsure, m, stage.commit_gap)
        if not chosen:  # the row is done: a pass that takes nothing back leaves all as it was
            self.confidence = known
        for i in chosen:
            self.ids[i] = MASK
            self.times[i] += 1
        if stage.confidence == "shadow" and chosen:
            self.shadow([i for i in self.slots if i not in chosen])
        return sorted(chosen)

    def one_pass(self, stage: Stage, s: int, k: int, masked: list[int]) -> None:
        logits = self.logits(self.ids)
        T, n = len(self.ids), len(self.slots)
        uniform = self.random("sample", s, k)
        K = stage.num_passes or math.ceil(n / (stage.tokens_per_pass or n))
        first, last = stage.temperature
        temperature = first + (last - first) * min(1.0, k / (K - 1)) if K > 1 else last

        def draw_at(i: int) -> tuple[int, float]:
            beside = {self.ids[j] for j in (i - 1, i + 1) if 0 <= j < T} - {MASK, PAD}
            return draw(logits[i], beside, uniform[i], temperature, stage, self.allowed[i])

        drawn = {i: draw_at(i) for i in masked}
        if stage.refills:
            chosen, waived = masked, []
        else:
            tau = stage.order_noise * max(0.0, 1 - (k + 1) / K)
            noise = tau * self.gumbel(s, k)
            log_p = {i: log_softmax(logits[i], self.allowed[i]) for i in masked}
            score = self.score(stage, masked, drawn, log_p, noise, self.gumbel(s, k))
            p = {i: math.exp(drawn[i][1]) for i in masked}
            chosen = plain_accept(stage, score, self.quota(stage, k, masked), p, entropies(log_p))
            waived = []
            if k == stage.num_passes - 1:
                chosen = greedy_gap(score, n, stage.commit_gap)
                waived = [i for i in walk(score) if i not in chosen]
        for i in chosen:
            self.ids[i], self.confidence[i] = drawn[i]
        for i in waived:
            self.ids[i], self.confidence[i] = draw_at(i)
        self.passes.append(sorted([*chosen, *waived]))

    def score(self, stage, masked, drawn, log_p, noise, gumbel) -> dict[int, float]:
        H = entropies(log_p)
        middle = {i: run[0] + run[-1] for run in runs(masked) for i in run}
        by_order = {
            "confidence": lambda i: drawn[i][1] + noise[i],
            "margin": lambda i: margin(log_p[i]) + noise[i],
            "entropy": lambda i: -H[i] + noise[i],
            "left_to_right": lambda i: -float(i),
            "middle": lambda i: -abs(2 * i - middle[i]),
            "random": lambda i: np.float32(gumbel[i]),
        }
        return {i: by_order[stage.order](i) for i in masked}

    def quota(self, stage: Stage, k: int, masked: list[int]) -> int:
        if stage.tokens_per_pass:
            return stage.tokens_per_pass
        if stage.num_passes == 0:
            return 0  # an adaptive quota, which does not count
        done = (k + 1) / stage.num_passes
        gamma = math.cos(math.pi / 2 * done) if stage.quota == "cosine" else 1 - done
        return max(1, len(masked) - math.floor(len(self.slots) * gamma + 1e-9))


def margin(log_p: np.ndarray) -> float:
    best, second = np.sort(np.exp(log_p))[::-1][:2]
    return float(np.log(best - second)) if best > second else -87.5


def entropies(log_p: dict[int, np.ndarray]) -> dict[int, float]:
    return {
        i: float(-(np.exp(lp) * np.where(np.isinf(lp), 0, lp)).sum()) for i, lp in log_p.items()
    }


def plain_generate(
    denoiser: nn.Module,
    ids: Tensor,
    fillable: Tensor,
    stages: tuple[Stage, ...],
    seed: int,
    *,
    block_length: int = 0,
    min_tokens: int = 0,
) -> list[int]:
    """The decoded row (T,) of ids and fillable (T,)."""
    allowed = np.asarray(specials().emittable)
    row = PlainRow(denoiser, ids.tolist(), fillable.tolist(), allowed, seed, min_tokens)
    return row.run(stages, block_length)
