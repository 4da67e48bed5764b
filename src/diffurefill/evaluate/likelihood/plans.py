"""One continuation's score as a plan: it asks for rows, is sent readings, and returns a score.

A plan is a generator, so that the plans of many texts can be run side by side and their rows be
read together. Fixed orders and the ELBO ask once for all their rows; an order that the model
decides asks one row at a time. Sources: spec algorithms 6.1-6.2; DUEL (arXiv:2603.01367); LLaDA
(arXiv:2502.09992).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from diffurefill.evaluate.likelihood.passes import Reader, Reading, Row
from diffurefill.evaluate.likelihood.texts import Score, Text
from diffurefill.runtime import philox

Plan = Generator[list[Row], list[Reading], Score]

WINDOW_TOKENS = 1 << 22
"""Tokens of the rows of plans that are run side by side: 16 MiB of ids."""


def fixed_order(
    text: Text,
    order: Sequence[int] | NDArray[np.int64],
    *,
    mask_id: int,
    right_masks: int = 0,
    tokens_per_pass: int = 1,
) -> Plan:
    """Exact log-likelihood of the sampler that writes the continuation's places in this `order`.

    `order` is a permutation of 0..n-1; 0..n-1 itself is the left-to-right chain rule. Each row
    shows what was written before, and asks about the next `tokens_per_pass` places at once.
    """
    readings = yield ordered_rows(text, order, mask_id, right_masks, tokens_per_pass)
    return total(readings)


def ordered_rows(
    text: Text,
    order: Sequence[int] | NDArray[np.int64],
    mask_id: int,
    right_masks: int = 0,
    tokens_per_pass: int = 1,
) -> list[Row]:
    places, canvas, rows = np.asarray(order, np.int64), text.hidden(mask_id, right_masks), []
    for start in range(0, len(places), tokens_per_pass):
        at = np.sort(text.first + places[start : start + tokens_per_pass])
        rows.append(Row(canvas, at, text.ids[at], text.first))
        canvas = canvas.copy()
        canvas[at] = text.ids[at]
    return rows


def autoregressive(text: Text) -> Plan:
    """Exact log-likelihood of a causal model: one row, each token read behind the one before it."""
    at = np.arange(text.first - 1, len(text.ids) - 1)
    readings = yield [Row(text.ids[:-1], at, text.continuation, text.first)]
    return total(readings)


def surest_first(
    text: Text, *, mask_id: int, right_masks: int = 0, tokens_per_pass: int = 1
) -> Plan:
    """Exact log-likelihood of the sampler that fills the places it is surest of first.

    How sure the model is of a place does not depend on the token that will stand there, so that
    every text has one path; ties go to the left. Asks one row at a time, n rows in all.
    """
    canvas = text.hidden(mask_id, right_masks)
    open_at = np.arange(text.first, len(text.ids))
    taken: list[Reading] = []
    while len(open_at):
        (reading,) = yield [Row(canvas, open_at, text.ids[open_at], text.first)]
        best = np.argsort(-reading.sureness, kind="stable")[:tokens_per_pass]
        log_prob, is_top, sureness = reading
        taken.append(Reading(log_prob[best], is_top[best], sureness[best]))
        canvas = canvas.copy()
        canvas[open_at[best]] = text.ids[open_at[best]]
        open_at = np.delete(open_at, best)
    return total(taken)


def elbo(
    text: Text,
    *,
    mask_id: int,
    samples: int,
    seed: int,
    right_masks: int = 0,
    check_greedy: bool = True,
) -> Plan:
    """Monte Carlo estimate of the ELBO: mean over masks of n / k times the log-likelihood of the k
    masked tokens.

    A lower bound in expectation, and another quantity than the chain rule unless n = 1. The masks
    depend on seed, context and n alone: choices of one length share them, so that part of the noise
    of their difference cancels. `check_greedy` asks for the chain rule's rows too: the flag is
    theirs, and False without them.
    """
    n = len(text.continuation)
    key = text.ids[: text.first].tobytes().hex()
    masks = stratified_masks(n, samples, philox(seed, "elbo", n, key))
    rows = [_masked_row(text, mask, mask_id, right_masks) for mask in masks]
    greedy_rows = ordered_rows(text, range(n), mask_id, right_masks) if check_greedy else []
    readings = yield rows + greedy_rows
    weighted = [n / len(r.log_prob) * r.log_prob.sum() for r in readings[: len(rows)]]
    is_greedy = check_greedy and total(readings[len(rows) :]).is_greedy
    return Score(float(np.mean(weighted)), is_greedy)


def _masked_row(text: Text, mask: NDArray[np.bool_], mask_id: int, right_masks: int) -> Row:
    at = text.first + np.flatnonzero(mask)
    canvas = text.hidden(mask_id, right_masks)
    shown = text.first + np.flatnonzero(~mask)
    canvas[shown] = text.ids[shown]
    return Row(canvas, at, text.ids[at], text.first)


def stratified_masks(n: int, samples: int, rng: np.random.Generator) -> list[NDArray[np.bool_]]:
    """`samples` masks (n,) of exact counts: evenly spread over 1..n, in nearly complementary pairs.

    Each mask alone is what the plain estimator draws: its count uniform on 1..n, then its places
    uniform. Together they vary less: one shared offset spreads the counts, and a small count is
    paired with a large one at the other end of the same permutation, so that a pair hides every
    place about once (spec performance 6: less than half the standard deviation of independent t).
    """
    offset = rng.random()
    counts = [int(n * ((b + offset) / samples)) + 1 for b in range(samples)]
    masks = []
    for b in range((samples + 1) // 2):
        shuffled = rng.permutation(n)
        masks.append(_mask_of(shuffled[: counts[b]], n))
        other = samples - 1 - b
        if other != b:
            masks.append(_mask_of(shuffled[n - counts[other] :], n))
    return masks


def _mask_of(places: NDArray[np.int64], n: int) -> NDArray[np.bool_]:
    mask = np.zeros(n, dtype=bool)
    mask[places] = True
    return mask


def total(readings: Sequence[Reading]) -> Score:
    log_likelihood = float(sum(reading.log_prob.sum() for reading in readings))
    return Score(log_likelihood, all(bool(reading.is_top.all()) for reading in readings))


def run_plans(
    plans: Iterable[Plan],
    reader: Reader,
    on_scores: Callable[[int], None] | None = None,
) -> list[Score]:
    """The scores of `plans`, in order. Rows are shared among plans that are near in the order.

    `on_scores` is told how many are done, a window at a time.
    """
    scores: list[Score] = []
    window: list[_Running] = []
    tokens = 0
    for plan in plans:
        running = _Running(plan)
        window.append(running)
        tokens += sum(len(row.canvas) for row in running.rows)
        if tokens >= WINDOW_TOKENS:
            scores += _finish(window, reader)
            window, tokens = [], 0
            if on_scores is not None:
                on_scores(len(scores))
    return scores + _finish(window, reader)


class _Running:
    """A plan that has been started: the rows it waits for, or its score."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rows: list[Row] = next(plan)
        self.score: Score | None = None

    def send(self, readings: list[Reading]) -> None:
        try:
            self.rows = self.plan.send(readings)
        except StopIteration as done:
            self.score = done.value


def _finish(window: Sequence[_Running], reader: Reader) -> list[Score]:
    waiting = list(window)
    while waiting:
        readings = iter(reader.read([row for running in waiting for row in running.rows]))
        for running in waiting:
            running.send([next(readings) for _ in running.rows])
        waiting = [running for running in waiting if running.score is None]
    return [running.score for running in window if running.score is not None]
