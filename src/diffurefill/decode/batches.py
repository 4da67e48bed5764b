"""Many rows of different lengths, filled in batches of like length: short ones pay for no padding.

A row's result hangs on its own ids and seed alone, so that batches change nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from diffurefill.decode.canvas import Canvas
from diffurefill.decode.record import Generation

CALL_POSITIONS = {"cpu": 64, "cuda": 4096}
"""What a call of the denoiser costs beside its positions, in positions, by device: about the size
at which a call takes twice the time of a tiny one. The CPU's was measured on a model of 2.5 million
parameters; the GPU's is a guess."""
MAX_LOGITS = 1 << 28
"""Logits of a batch, were all its positions open: 1 GiB in float32."""


def buckets(lengths: Sequence[int], *, call_positions: int, max_positions: int) -> list[list[int]]:
    """Rows of `lengths` dealt into batches: the rows of each, in order of length.

    Of all ways to cut the sorted rows into batches, that with the least rows times longest row,
    summed, plus `call_positions` a batch. No batch holds more than `max_positions`, unless a single
    row does.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    longest = np.asarray(lengths)[order]
    best, cut = np.zeros(len(order) + 1), np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):  # the cheapest way to cut the first `end` rows
        num_rows = np.arange(end, 0, -1)  # of a last batch that starts at 0, 1, ... end - 1
        positions = num_rows * longest[end - 1]
        fits = (positions <= max_positions) | (num_rows == 1)
        cost = np.where(fits, best[:end] + positions + call_positions, np.inf)
        cut[end] = cost.argmin()
        best[end] = cost[cut[end]]
    found, end = [], len(order)
    while end > 0:
        found.append(order[cut[end] : end].tolist())
        end = cut[end]
    return found[::-1]


def in_buckets(
    canvas: Canvas,
    fill: Callable[[Canvas, list[int]], Generation],
    *,
    device: torch.device,
    vocab_size: int,
) -> Generation:
    """`fill(canvas, rows)` of batch after batch, put together on the CPU; without trajectory.

    fill: fills a canvas of these `rows` of the whole.
    """
    lengths = (canvas.doc_ids >= 0).sum(dim=1).tolist()
    ids, confidence = canvas.ids.clone(), torch.zeros(canvas.ids.shape)
    row_passes = torch.zeros(len(lengths), dtype=torch.int64)
    num_forward_passes = num_positions = 0
    call_positions, max_positions = CALL_POSITIONS[device.type], MAX_LOGITS // vocab_size
    for rows in buckets(lengths, call_positions=call_positions, max_positions=max_positions):
        width = max(lengths[row] for row in rows)
        part = Canvas(*(x[rows, :width] for x in (canvas.ids, canvas.fillable, canvas.doc_ids)))
        done = fill(part, rows)
        ids[rows, :width], confidence[rows, :width] = done.ids.cpu(), done.confidence.cpu()
        row_passes[rows] = done.row_passes.cpu()
        num_forward_passes += done.num_forward_passes
        num_positions += done.num_positions
    return Generation(ids, confidence, num_forward_passes, [], row_passes, num_positions)
