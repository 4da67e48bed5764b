"""Rows -> what the autoregressive twin learns from: every token from those to its left.

The same rows in the same order as the denoiser's, nothing masked: the pair differs in the
objective alone (spec algorithms 5.6).
"""

from __future__ import annotations

import numpy as np
import torch

from diffurefill.objective.corruption import Corrupted, RowArrays, part_of_positions


def next_token(rows: RowArrays) -> Corrupted:
    """As `corrupt` returns it: `is_masked` marks the positions whose next token is a target.

    A document's last token has none, nor has PAD. Every part has t = 1: nothing is drawn.
    """
    ids, doc_ids = rows.ids, rows.doc_ids
    has_next = np.zeros(ids.shape, dtype=bool)
    has_next[:, :-1] = (doc_ids[:, :-1] == doc_ids[:, 1:]) & (doc_ids[:, 1:] >= 0)
    parts = part_of_positions(rows.part_lengths, ids.shape[1])
    counts = np.bincount(parts.ravel(), has_next.ravel())
    return Corrupted(
        canvas=torch.from_numpy(ids.astype(np.int64)),
        is_masked=torch.from_numpy(has_next),
        targets=torch.from_numpy(np.roll(ids, -1, axis=1).astype(np.int64)),
        parts=torch.from_numpy(parts),
        t=torch.ones(len(counts)),
        num_eligible=torch.from_numpy(counts.astype(np.int64)),
        has_prefix=torch.zeros(len(counts), dtype=torch.bool),
    )
