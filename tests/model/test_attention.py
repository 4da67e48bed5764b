import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from diffurefill.config import UserError
from diffurefill.model.attention import (
    _segment_ids,
    attention,
    choose_backend,
    segments_from_doc_ids,
)

# Flex runs uncompiled on CPU, where it serves only to compare; torch warns that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


def rows_of_documents(num_rows, num_positions):
    """(B, T) doc_ids as packing writes them: increasing ids, PAD at the end of some rows."""
    lengths = st.lists(st.integers(1, num_positions), min_size=1, max_size=6)
    row = st.tuples(lengths, st.booleans()).map(lambda x: one_row(*x, num_positions))
    return st.lists(row, min_size=num_rows, max_size=num_rows).map(torch.stack)


def one_row(lengths, is_padded, num_positions):
    ids = torch.arange(len(lengths), dtype=torch.int32)
    row = ids.repeat_interleave(torch.tensor(lengths))[:num_positions]
    rest = -1 if is_padded else len(lengths)
    return torch.nn.functional.pad(row, (0, num_positions - len(row)), value=rest)


def qkv(num_rows, num_positions, seed=0, heads=2, head_dim=16, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, num_rows, heads, num_positions, head_dim)
    return torch.randn(shape, generator=generator).to(device)


def loop_over_documents(q, k, v, doc_ids, causal):
    """The slow plain reference: every document by itself, softmax by hand; a PAD sees itself."""
    out = v.clone()
    for row, ids in enumerate(doc_ids.tolist()):
        for document in set(ids) - {-1}:
            at = [i for i, d in enumerate(ids) if d == document]
            scores = q[row][:, at] @ k[row][:, at].mT / q.shape[-1] ** 0.5
            if causal:
                later = torch.ones(len(at), len(at)).triu(1).bool()
                scores = scores.masked_fill(later, -torch.inf)
            out[row][:, at] = scores.softmax(-1) @ v[row][:, at]
    return out


@pytest.mark.parametrize("causal", [False, True])
@given(doc_ids=rows_of_documents(3, 24), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_sdpa_equals_a_loop_over_documents(doc_ids, seed, causal):
    q, k, v = qkv(*doc_ids.shape, seed=seed)
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend="sdpa")
    expected = loop_over_documents(q, k, v, doc_ids, causal)
    torch.testing.assert_close(attention(q, k, v, segments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_positions", [100, 256, 300])
def test_flex_equals_a_loop_over_documents(num_positions, causal):
    doc_ids = torch.stack(
        [one_row([130, 20, 60], True, num_positions), one_row([1, 50, 140], False, num_positions)]
    )
    q, k, v = qkv(*doc_ids.shape)
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend="flex")
    expected = loop_over_documents(q, k, v, doc_ids, causal)
    torch.testing.assert_close(attention(q, k, v, segments), expected, atol=1e-5, rtol=1e-5)


def test_flex_is_right_for_ids_in_any_order():
    generator = torch.Generator().manual_seed(0)
    doc_ids = torch.randint(-1, 3, (2, 300), generator=generator, dtype=torch.int32)
    doc_ids[:, :140] = 7  # the highest id first
    q, k, v = qkv(2, 300)
    segments = segments_from_doc_ids(doc_ids, causal=False, backend="flex")
    expected = loop_over_documents(q, k, v, doc_ids, causal=False)
    torch.testing.assert_close(attention(q, k, v, segments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_positions", [256, 700])
@given(data=st.data())
@settings(deadline=None, max_examples=12)
def test_block_masks_equal_those_of_create_block_mask(num_positions, causal, data):
    doc_ids = data.draw(rows_of_documents(2, num_positions))
    segment_ids = _segment_ids(doc_ids)

    def allowed(b, h, q, k):
        same = segment_ids[b, q] == segment_ids[b, k]
        return same & (q >= k) if causal else same

    ours = segments_from_doc_ids(doc_ids, causal=causal, backend="flex").mask
    theirs = create_block_mask(
        allowed, 2, None, num_positions, num_positions, device="cpu", _compile=False
    )
    assert ours.shape == theirs.shape
    for ordered in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(theirs, f"{ordered}_num_blocks")
        assert torch.equal(getattr(ours, f"{ordered}_num_blocks"), counts)
        chosen = torch.arange(theirs.kv_indices.shape[-1]) < counts[..., None]
        indices = getattr(theirs, f"{ordered}_indices")[chosen]
        assert torch.equal(getattr(ours, f"{ordered}_indices")[chosen], indices)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_pad_has_finite_outputs_and_gradients(causal):
    doc_ids = torch.full((1, 8), -1)
    q, k, v = qkv(1, 8).requires_grad_()
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend="sdpa")
    out = attention(q, k, v, segments)
    torch.testing.assert_close(out, v)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_without_doc_ids_a_row_is_one_document(backend, causal):
    q, k, v = qkv(2, 20)
    segments = segments_from_doc_ids(None, causal=causal, backend=backend)
    expected = loop_over_documents(q, k, v, torch.zeros(2, 20, dtype=torch.int32), causal)
    torch.testing.assert_close(attention(q, k, v, segments), expected, atol=1e-5, rtol=1e-5)


def test_training_with_flex_on_cpu_is_refused_in_words():
    q, k, v = qkv(1, 128).requires_grad_()
    segments = segments_from_doc_ids(torch.zeros(1, 128).int(), causal=False, backend="flex")
    with pytest.raises(UserError, match="sdpa"):
        attention(q, k, v, segments)


def test_cpu_gets_sdpa():
    assert choose_backend(torch.device("cpu")) == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_flex_and_sdpa_train_alike_on_cuda(causal):
    doc_ids = torch.stack([one_row([130, 20, 60], True, 384), one_row([1, 200], False, 384)])
    doc_ids = doc_ids.cuda()
    results = []
    for backend in ("sdpa", "flex"):
        q, k, v = qkv(2, 384, head_dim=64, device="cuda").requires_grad_()
        out = attention(q, k, v, segments_from_doc_ids(doc_ids, causal=causal, backend=backend))
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for sdpa, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, sdpa, atol=2e-2, rtol=2e-2)  # TF32 products
