"""Targets of the autoregressive twin: the next token of the same document, and nothing else."""

from types import SimpleNamespace

import numpy as np

from diffurefill.config import ObjectiveConfig
from diffurefill.objective.corruption import corrupt
from diffurefill.objective.next_token import next_token

PAD = 9


def rows(ids, doc_ids, part_lengths):
    return SimpleNamespace(
        ids=np.array(ids),
        doc_ids=np.array(doc_ids, dtype=np.int32),
        span_ids=np.zeros_like(np.array(doc_ids)),
        part_lengths=np.array(part_lengths, dtype=np.int32),
    )


def test_targets_are_the_next_tokens_of_the_same_document():
    found = next_token(rows([[0, 1, 2, 0, 3, PAD]], [[4, 4, 4, 5, 5, -1]], [6]))
    assert found.canvas.tolist() == [[0, 1, 2, 0, 3, PAD]]
    assert found.is_masked.tolist() == [[True, True, False, True, False, False]]
    assert found.targets[found.is_masked].tolist() == [1, 2, 3]
    assert found.t.tolist() == [1.0]
    assert found.num_eligible.tolist() == [3]


def test_a_short_row_counts_each_of_its_parts():
    doc_ids = [[0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, 2]]
    found = next_token(rows(np.arange(12).reshape(2, 6), doc_ids, [3, 6]))
    assert found.parts.tolist() == [[0, 0, 0, 1, 1, 1], [2] * 6]
    assert found.num_eligible.tolist() == [2, 2, 5]
    assert found.is_masked.sum().item() == 9


def test_rows_of_pad_alone_have_no_target():
    found = next_token(rows([[PAD] * 4], [[-1] * 4], [4]))
    assert not found.is_masked.any()
    assert found.num_eligible.tolist() == [0]


def test_tensors_are_of_the_kinds_and_shapes_of_a_corrupted_batch():
    batch = rows(np.arange(12).reshape(2, 6), [[0] * 6, [1] * 5 + [-1]], [3, 6])
    masked = corrupt(batch, ObjectiveConfig(), keys=[(0,), (1,)], mask_id=20, bos_id=0)
    for ours, theirs in zip(next_token(batch), masked, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
