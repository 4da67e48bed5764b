"""The chain rule's cost: each distinct row once and without padding, beside a padded row per token;
and the two-stream screen beside the chain rule.

    python bench/likelihood.py [--quick]

`plain` is how a chain rule is written first, and in published scorers: a row for every token of
every continuation, in the order of the requests, batches padded to their longest row, the
vocabulary head at every position. `ours` is evaluate/likelihood. Both score the same requests with
the same untrained model (6 layers, width 256; the head is 17% of its work, as in base-1b) in fp32
on one thread.

Requests have the shapes of the benchmarks: `endings` (HellaSwag: 40-80 tokens of context, four
continuations of 15-35), `answers` (ARC: 20-45, four of 2-6), `letters` (MMLU: 60-140, four of one
token). `forward_token_ratio` and `time_ratio` are plain over ours, over all requests; times are
CPU seconds, medians of interleaved repeats (full: 3; --quick: 1). `forward_token_ratio_full_rows`
is what padding every row to 2,048 tokens, as one published scorer can, would cost over ours: it is
counted, not run. `max_abs_difference` is the largest difference of two scores, in nats.

`screen` (_screen.py): items of text and a small model trained for it (full: 1,200 steps, some four
minutes; --quick: 4 steps). `forward_token_ratio` and `time_ratio` are ours over the screen with one
item in five scored again, `same_best` the share of items of which both find the same choice best;
`_alone` the same with none scored again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from _common import report
from _screen import screen_figures
from diffurefill.config import ModelConfig
from diffurefill.decode.canvas import Specials
from diffurefill.evaluate.likelihood.passes import Cost
from diffurefill.evaluate.likelihood.scorer import Pair, Scorer, ScoringModel, score
from diffurefill.model.denoiser import Denoiser
from diffurefill.runtime import philox, set_threads

BOS, EOS, MASK, PAD = 0, 1, 2, 3
MODEL = ModelConfig(vocab_size=4096, width=256, layers=6, heads=4, ffn_width=768)
PLAIN_ROWS = 32
FULL_ROW = 2048
# name: items of a full run, tokens of context, tokens of each of four continuations
WORKLOADS = {
    "endings": (6, (40, 80), (15, 35)),
    "answers": (24, (20, 45), (2, 6)),
    "letters": (24, (60, 140), (1, 1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    set_threads(1)
    model = build_model()
    each = {name: compare(name, model, quick=quick) for name in WORKLOADS}
    total = {key: sum(one[key] for one in each.values()) for key in next(iter(each.values()))}
    figures = {
        **ratios(total),
        "max_abs_difference": max(one["max_abs_difference"] for one in each.values()),
        "workloads": {
            name: {**ratios(one), "max_abs_difference": one["max_abs_difference"]}
            for name, one in each.items()
        },
        "screen": screen_figures(quick=quick),
        "tokens": {key: total[key] for key in ("plain_tokens", "our_tokens", "full_row_tokens")},
    }
    report("likelihood", figures, quick=quick)


def ratios(one: dict[str, float]) -> dict[str, float]:
    return {
        "forward_token_ratio": round(one["plain_tokens"] / one["our_tokens"], 3),
        "time_ratio": round(one["plain_seconds"] / one["our_seconds"], 3),
        "forward_token_ratio_full_rows": round(one["full_row_tokens"] / one["our_tokens"], 1),
    }


def build_model() -> ScoringModel:
    denoiser = Denoiser(MODEL)
    denoiser.init_weights(torch.Generator().manual_seed(0))
    specials = Specials(BOS, EOS, MASK, PAD, np.arange(MODEL.vocab_size) > PAD)
    return ScoringModel(denoiser.eval(), specials, FULL_ROW, torch.device("cpu"))


def requests(name: str, *, quick: bool) -> list[Pair]:
    num_items, context_lengths, lengths = WORKLOADS[name]
    rng = philox("bench likelihood", name)
    pairs: list[Pair] = []
    for _ in range(num_items // 3 if quick else num_items):
        context = rng.integers(4, MODEL.vocab_size, rng.integers(*context_lengths, endpoint=True))
        for _ in range(4):
            n = rng.integers(*lengths, endpoint=True)
            pairs.append((context.tolist(), rng.integers(4, MODEL.vocab_size, n).tolist()))
    return pairs


def compare(name: str, model: ScoringModel, *, quick: bool) -> dict[str, float]:
    """Tokens, median seconds and the largest difference, on one workload."""
    pairs = requests(name, quick=quick)
    costs: list[Cost] = []

    def ours() -> list[float]:
        scored = score(model, pairs, Scorer())
        costs.append(scored.cost)
        return [one.log_likelihood for one in scored.scores]

    scores, seconds = timed(
        {"plain": lambda: plain(model, pairs), "ours": ours}, repeats=1 if quick else 3
    )
    difference = max(abs(a - b) for a, b in zip(scores["plain"], scores["ours"], strict=True))
    batches = list(plain_batches(pairs))
    return {
        "plain_tokens": sum(len(rows) * max(map(len, rows)) for rows, _ in batches),
        "our_tokens": costs[0].forward_tokens,
        "full_row_tokens": FULL_ROW * sum(len(rows) for rows, _ in batches),
        "plain_seconds": seconds["plain"],
        "our_seconds": seconds["ours"],
        "max_abs_difference": difference,
    }


def timed(
    calls: dict[str, Callable[[], list[float]]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """What each call gave, and the median of its CPU seconds; the calls by turns."""
    scores: dict[str, list[float]] = {}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            scores[name] = call()
            taken[name].append(time.process_time() - start)
    return scores, {name: statistics.median(times) for name, times in taken.items()}


# --- a padded row per token ----------------------------------------------------------------------


def plain_batches(
    pairs: Sequence[Pair],
) -> Iterator[tuple[list[list[int]], list[tuple[int, int, int]]]]:
    """Rows, and for each its request, the position asked about and the token."""
    rows: list[list[int]] = []
    asked: list[tuple[int, int, int]] = []
    for index, (context, continuation) in enumerate(pairs):
        for i, token in enumerate(continuation):
            hidden = [MASK] * (len(continuation) - i)
            rows.append([BOS, *context, *continuation[:i], *hidden])
            asked.append((index, 1 + len(context) + i, token))
            if len(rows) == PLAIN_ROWS:
                yield rows, asked
                rows, asked = [], []
    if rows:
        yield rows, asked


@torch.inference_mode()
def plain(model: ScoringModel, pairs: Sequence[Pair]) -> list[float]:
    scores = [0.0] * len(pairs)
    for rows, asked in plain_batches(pairs):
        width = max(map(len, rows))
        canvas = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        doc_ids = torch.where(canvas == PAD, -1, 0).int()
        log_probs = model.denoiser(canvas, doc_ids).float().log_softmax(dim=-1)  # (B, T, V)
        for row, (index, position, token) in zip(log_probs, asked, strict=True):
            scores[index] += float(row[position, token])
    return scores


if __name__ == "__main__":
    main()
