import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from diffurefill.model.segments import (
    ALONE,
    FILLED_UP,
    PAD,
    TOGETHER,
    _segment_ids,
    documents_of,
    segments_from_doc_ids,
)
from tests.model.attention_cases import CASES, one_row, parts_with_pad, rows_of_documents


def block_masks(doc_ids, causal):
    """Ours and the library's, which looks at every pair."""
    num_rows, num_positions = doc_ids.shape
    pads = torch.arange(num_positions).expand_as(doc_ids) + 1000
    plain_ids = torch.where(doc_ids >= 0, doc_ids, pads)

    def allowed(b, h, q, k):
        same = plain_ids[b, q] == plain_ids[b, k]
        return same & (q >= k) if causal else same

    theirs = create_block_mask(
        allowed, num_rows, None, num_positions, num_positions, device="cpu", _compile=False
    )
    return segments_from_doc_ids(doc_ids, causal=causal, backend="flex").mask, theirs


def assert_equal_blocks(doc_ids, causal):
    ours, theirs = block_masks(doc_ids, causal)
    assert ours.shape == theirs.shape
    for part in ("kv", "full_kv", "q", "full_q"):
        for kind in ("num_blocks", "indices"):
            a, b = (getattr(mask, f"{part}_{kind}") for mask in (ours, theirs))
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"{part}_{kind}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_positions", [256, 700])
@given(data=st.data())
@settings(max_examples=12)
def test_block_masks_equal_those_of_create_block_mask(num_positions, causal, data):
    assert_equal_blocks(data.draw(rows_of_documents(2, num_positions)), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_block_masks_of_the_hard_rows_equal_too(case, causal):
    assert_equal_blocks(CASES[case], causal)


def test_padded_parts_of_a_short_row_do_not_look_across():
    mask = segments_from_doc_ids(parts_with_pad()[None], causal=False, backend="flex").mask
    assert torch.equal(mask.to_dense()[0, 0], torch.eye(4, dtype=torch.int32))


@given(st.lists(st.lists(st.integers(-1, 3), min_size=9, max_size=9), min_size=1, max_size=3))
def test_segments_are_equal_where_documents_are(rows):
    ids = torch.tensor(rows, dtype=torch.int32)
    segments = _segment_ids(ids)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0)
    expected = same | torch.eye(9, dtype=torch.bool)
    assert torch.equal(segments[:, :, None] == segments[:, None, :], expected)


@given(rows_of_documents(3, 24))
def test_segments_do_not_decrease_where_documents_do_not(doc_ids):
    assert (_segment_ids(doc_ids).diff(dim=1) >= 0).all()


@given(rows_of_documents(3, 24))
def test_documents_tile_the_rows(doc_ids):
    documents = documents_of(doc_ids)
    rebuilt = np.full(doc_ids.shape, 99)
    for row, start, stop, is_pad in documents.table:
        values = doc_ids[row, start:stop].tolist()
        assert len(set(values)) == 1
        assert (values[0] < 0) == is_pad
        rebuilt[row, start:stop] = values[0]
    assert np.array_equal(rebuilt, doc_ids.numpy())
    assert documents.in_one_piece


@pytest.mark.parametrize(
    ("rows", "whole", "one_piece"),
    [
        ([[0, 0], [0, 0]], True, True),
        ([[0, 0], [0, 1]], False, True),
        ([[0, -1], [0, 0]], False, True),
        ([[-1, -1]], False, True),
        ([[0, 1, 0]], False, False),
        ([[0, -1, 0]], False, False),
        ([[-1, 0, -1]], False, True),
    ],
)
def test_what_documents_know_of_themselves(rows, whole, one_piece):
    documents = documents_of(torch.tensor(rows))
    assert (documents.are_whole_rows, documents.in_one_piece) == (whole, one_piece)


def test_packed_rows_lie_end_to_end():
    doc_ids = torch.stack([one_row([3, 5], True, 12), one_row([12], True, 12)])
    packed = segments_from_doc_ids(doc_ids, causal=False, backend="varlen").mask
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens[:5].tolist() == [0, 3, 8, 12, 24]
    assert packed.cu_seqlens[5:].eq(24).all()
    assert packed.max_length == 12
    assert torch.equal(packed.is_pad, doc_ids < 0)


@given(rows_of_documents(2, 100))
def test_packed_rows_bound_their_longest_document(doc_ids):
    packed = segments_from_doc_ids(doc_ids, causal=False, backend="varlen").mask
    assert packed.cu_seqlens.diff().max() <= packed.max_length
    assert packed.max_length in (25, 50, 100)
    assert packed.cu_seqlens[0] == 0
    assert packed.cu_seqlens[-1] == 200
    assert (packed.is_pad is None) == bool((doc_ids >= 0).all())


# --- ranges ---------------------------------------------------------------------------------------


def ranges_of(doc_ids, dtype=None):
    return segments_from_doc_ids(doc_ids, causal=False, backend="loop", dtype=dtype).mask


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 8), (torch.bfloat16, 16)])
@given(rows_of_documents(3, 130))
def test_every_position_has_one_slot_and_every_document_one_place(dtype, step, doc_ids):
    B, T = doc_ids.shape
    ranges, flat, seen = ranges_of(doc_ids, dtype), doc_ids.flatten(), []
    for kind, first, count, length, row, start in ranges.pieces.tolist():
        used = slice(first, first + count * length)
        sources = ranges.sources[used].view(count, length).tolist()
        targets = ranges.targets[used].view(count, length).tolist()
        for reads, writes in zip(sources, targets, strict=True):
            real = [at for at in writes if at < B * T]
            assert writes == real + [B * T] * (length - len(real))
            assert reads == real + [real[0]] * (length - len(real))
            assert real == list(range(real[0], real[0] + len(real)))
            assert len({int(flat[at]) for at in real}) == 1
            assert (kind == PAD) == (flat[real[0]] < 0)
            assert kind == FILLED_UP or length == len(real)
            assert kind not in (TOGETHER, FILLED_UP) or length % step == 0
            if kind == ALONE:
                assert (count, row * T + start) == (1, real[0])
            seen += real
    assert sorted(seen) == list(range(B * T))


def pieces_of(lengths, num_positions=512, **options):
    pieces = ranges_of(one_row(lengths, True, num_positions)[None], **options).pieces
    return [tuple(piece[[0, 2, 3]].tolist()) for piece in pieces if piece[2]]


def test_short_documents_of_like_length_share_a_piece():
    assert pieces_of([20, 24, 23], 67) == [(FILLED_UP, 3, 24)]
    assert pieces_of([20, 24, 17], dtype=torch.bfloat16)[1:] == [(FILLED_UP, 3, 32)]
    assert pieces_of([16, 16, 16], 48) == [(TOGETHER, 3, 16)]
    assert pieces_of([20, 24], 44) == [(ALONE, 1, 20), (ALONE, 1, 24)]
    assert pieces_of([128, 128, 128], 384) == [(ALONE, 1, 128)] * 3
    assert pieces_of([5, 6, 300, 7], 400) == [(PAD, 82, 1), (FILLED_UP, 3, 8), (ALONE, 1, 300)]


def test_tables_come_in_few_sizes():
    sizes, slots = set(), set()
    for count in range(1, 100):
        doc_ids = torch.arange(100).clamp(max=count - 1)[None]
        ranges = ranges_of(doc_ids)
        sizes.add(len(ranges.pieces))
        slots |= {len(ranges.sources), len(ranges.targets)}
        packed = segments_from_doc_ids(doc_ids, causal=False, backend="varlen").mask
        sizes.add(packed.cu_seqlens.shape[0])
    assert sizes == {64, 128}
    assert slots == {1024}
