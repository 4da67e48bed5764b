import functools
import importlib
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import diffurefill.model.attention as attention_module
from diffurefill.config import UserError
from diffurefill.model import dense_attention, document_pieces
from diffurefill.model.attention import attention, segments_from_doc_ids
from diffurefill.model.backends import has_varlen
from diffurefill.model.document_loop import attend_per_document
from tests.model.attention_cases import (
    CASES,
    loop_over_documents,
    one_row,
    qkv,
    result_and_gradients,
    rows_of_documents,
)

# Flex runs uncompiled on CPU, where it serves only to compare; torch warns that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


@CAUSAL
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "loop"])
def test_forward_and_gradients_equal_a_loop_over_documents(backend, case, causal):
    doc_ids = CASES[case]
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend=backend)
    ours = result_and_gradients(lambda q, k, v: attention(q, k, v, segments), doc_ids)
    plain = result_and_gradients(
        lambda q, k, v: loop_over_documents(q, k, v, doc_ids, causal), doc_ids
    )
    for fast, slow in zip(ours, plain, strict=True):
        close(fast, slow)


@CAUSAL
@pytest.mark.parametrize("backend", ["sdpa", "loop"])
@given(doc_ids=rows_of_documents(3, 24), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_any_documents_equal_a_loop_over_documents(backend, doc_ids, seed, causal):
    q, k, v = qkv(*doc_ids.shape, seed=seed)
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend=backend)
    close(attention(q, k, v, segments), loop_over_documents(q, k, v, doc_ids, causal))


@CAUSAL
@pytest.mark.parametrize("case", CASES)
def test_flex_equals_a_loop_over_documents(case, causal):
    doc_ids = CASES[case]
    q, k, v = qkv(*doc_ids.shape)
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend="flex")
    close(attention(q, k, v, segments), loop_over_documents(q, k, v, doc_ids, causal))


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_of_numbers_gives_the_bits_of_one_of_bools(dtype, causal):
    for doc_ids in CASES.values():
        q, k, v = qkv(*doc_ids.shape).to(dtype)
        bools = segments_from_doc_ids(doc_ids, causal=causal, backend="sdpa")
        numbers = segments_from_doc_ids(doc_ids, causal=causal, backend="sdpa", dtype=dtype)
        assert (bools.mask.dtype, numbers.mask.dtype) == (torch.bool, dtype)
        assert torch.equal(attention(q, k, v, numbers), attention(q, k, v, bools))


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_ids_in_any_order_are_right_where_they_are_taken(backend):
    generator = torch.Generator().manual_seed(0)
    doc_ids = torch.randint(-1, 3, (2, 300), generator=generator, dtype=torch.int32)
    doc_ids[:, :140] = 7  # the highest id first
    q, k, v = qkv(2, 300)
    segments = segments_from_doc_ids(doc_ids, causal=False, backend=backend)
    close(attention(q, k, v, segments), loop_over_documents(q, k, v, doc_ids, causal=False))


@pytest.mark.parametrize("backend", ["loop", "varlen"])
def test_a_document_in_two_pieces_is_refused_in_words(backend):
    doc_ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    with pytest.raises(UserError, match=r"several pieces of its row.*use sdpa or flex"):
        segments_from_doc_ids(doc_ids, causal=False, backend=backend)


@CAUSAL
@pytest.mark.parametrize("backend", ["sdpa", "flex", "loop", "varlen"])
def test_without_doc_ids_a_row_is_one_document(backend, causal):
    q, k, v = qkv(2, 20)
    segments = segments_from_doc_ids(None, causal=causal, backend=backend)
    whole = torch.zeros(2, 20, dtype=torch.int32)
    close(attention(q, k, v, segments), loop_over_documents(q, k, v, whole, causal))


def test_a_pad_has_its_own_value_and_passes_its_own_gradient_only():
    doc_ids = torch.full((1, 8), -1)
    for backend in ("sdpa", "loop"):
        segments = segments_from_doc_ids(doc_ids, causal=False, backend=backend)
        q, k, v = qkv(1, 8).requires_grad_()
        out = attention(q, k, v, segments)
        close(out, v)
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert dq.abs().max() < 1e-6
        assert dk.abs().max() < 1e-6
        close(dv, torch.ones_like(dv))


# --- the loop's operators -------------------------------------------------------------------------


def loop_ranges(doc_ids):
    return segments_from_doc_ids(doc_ids, causal=False, backend="loop").mask


@CAUSAL
def test_the_loop_has_the_gradients_of_finite_differences(causal):
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 1, 1]])
    q, k, v = qkv(2, 6, head_dim=4).double().requires_grad_()
    ranges = loop_ranges(doc_ids)
    torch.autograd.gradcheck(
        lambda q, k, v: attend_per_document(q, k, v, ranges, causal), (q, k, v)
    )


@pytest.mark.parametrize("case", ["ragged", "short ones alike"])
def test_the_loop_takes_any_layout_of_its_inputs(case):
    doc_ids = CASES[case]
    B, T = doc_ids.shape
    joint = torch.randn(B, T, 3, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ranges, results = loop_ranges(doc_ids), []
    for attend in (
        lambda q, k, v: attend_per_document(q, k, v, ranges, False),
        lambda q, k, v: loop_over_documents(q, k, v, doc_ids, False),
    ):
        out = attend(*joint.permute(2, 0, 3, 1, 4)).transpose(1, 2).reshape(B, T, 32)
        results.append((out, torch.autograd.grad(out.square().sum(), joint)[0]))
    for fast, slow in zip(*results, strict=True):
        close(fast, slow)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_that_share_calls_may_come_in_any_number_of_them(dtype, causal, monkeypatch):
    doc_ids = CASES["short ones alike"]
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend="loop", dtype=dtype)
    counts = segments.mask.pieces[:, 2]

    def attend(q, k, v):
        return attention(q.to(dtype), k.to(dtype), v.to(dtype), segments)

    few = result_and_gradients(attend, doc_ids)
    monkeypatch.setattr(document_pieces, "BYTES_AT_ONCE", 1)
    pieces = document_pieces.Pieces(segments.mask, qkv(*doc_ids.shape)[0]).pieces
    assert len(pieces) == counts.sum() > (counts > 0).sum()
    for a, b in zip(few, result_and_gradients(attend, doc_ids), strict=True):
        close(a, b, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_the_loop_in_16_bit_is_near():
    doc_ids = CASES["a PAD tail"]
    q, k, v = qkv(*doc_ids.shape).bfloat16()
    out = attend_per_document(q, k, v, loop_ranges(doc_ids), False)
    assert out.dtype == torch.bfloat16
    expected = loop_over_documents(q.float(), k.float(), v.float(), doc_ids, False)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_the_loops_operators_keep_torchs_rules():
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, -1]])
    q, k, v = qkv(1, 6).requires_grad_()
    operator = torch.ops.diffurefill.attend_per_document.default
    torch.library.opcheck(
        operator,
        (q, k, v, *loop_ranges(doc_ids), False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def a_mask(num_rows, num_positions):
    """(B, 1, T, T): half of what there is, and every position itself."""
    shape, generator = (num_rows, 1, num_positions, num_positions), torch.Generator().manual_seed(2)
    seen = torch.rand(shape, generator=generator) > 0.5
    return seen | torch.eye(num_positions, dtype=torch.bool)


def test_the_products_operators_keep_torchs_rules():
    q, k, v = qkv(2, 6).bfloat16().requires_grad_()
    mask = a_mask(2, 6)
    for seen, causal in ((mask, False), (None, True)):
        torch.library.opcheck(
            torch.ops.diffurefill.attend_by_products.default,
            (q, k, v, seen, causal),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@CAUSAL
def test_a_compiled_block_takes_the_products_in_bf16(causal):
    doc_ids = CASES["a PAD tail"]
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend="sdpa", dtype=torch.bfloat16)
    called = []

    def count(graph, _):
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def in_bf16(attend):
        return result_and_gradients(
            lambda q, k, v: attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), segments).float(),
            doc_ids,
        )

    found = in_bf16(torch.compile(attention, backend=count, fullgraph=True))
    assert torch.ops.diffurefill.attend_by_products.default in called
    for compiled, eager in zip(found, in_bf16(attention), strict=True):
        assert torch.equal(compiled, eager)


# Dynamo itself looks at .grad of what it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_other_documents_do_not_compile_a_block_again():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention, backend=count, fullgraph=True)
    q, k, v = qkv(2, 200).requires_grad_()
    for lengths in ([90, 20], [1, 2, 3, 100], [200], [60] * 3):
        doc_ids = torch.stack([one_row(lengths, True, 200), one_row([10, 50], True, 200)])
        segments = segments_from_doc_ids(doc_ids, causal=False, backend="loop")
        out = compiled(q, k, v, segments)
        close(out, loop_over_documents(q, k, v, doc_ids, False))
    assert len(graphs) == 1


@torch.no_grad()
def test_other_documents_do_not_compile_flex_again():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention, backend=count, fullgraph=True, dynamic=False)
    q, k, v = qkv(2, 200)
    for lengths in ([90, 20], [1, 2, 3, 100], [200], [60] * 3):
        doc_ids = torch.stack([one_row(lengths, True, 200), one_row([10, 50], True, 200)])
        segments = segments_from_doc_ids(doc_ids, causal=False, backend="flex")
        out = compiled(q, k, v, segments)
        close(out, loop_over_documents(q, k, v, doc_ids, False))
    assert len(graphs) == 1


# --- varlen, with a stand-in for its kernel -------------------------------------------------------


def plain_varlen(q, k, v, starts, _, longest, __, *, window_size):
    """The kernel's contract in plain code: (T, H, K) in, documents between neighbours of starts."""
    out = torch.zeros_like(q)
    for start, stop in itertools.pairwise(starts.tolist()):
        assert stop - start <= longest
        if start < stop:
            parts = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            causal = {(-1, 0): True, (-1, -1): False}[window_size]
            attended = F.scaled_dot_product_attention(*parts, is_causal=causal)
            out[start:stop] = attended.transpose(0, 1)
    return out


@CAUSAL
@pytest.mark.parametrize("case", CASES)
def test_varlen_hands_the_documents_to_its_kernel(case, causal, monkeypatch):
    monkeypatch.setattr(attention_module, "_check", lambda *_: None)
    monkeypatch.setattr(attention_module, "_varlen_attn", lambda: plain_varlen)
    doc_ids = CASES[case]
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend="varlen")
    ours = result_and_gradients(lambda q, k, v: attention(q, k, v, segments), doc_ids)
    plain = result_and_gradients(
        lambda q, k, v: loop_over_documents(q, k, v, doc_ids, causal), doc_ids
    )
    for fast, slow in zip(ours, plain, strict=True):
        close(fast, slow)


def test_torchs_varlen_kernel_takes_what_we_hand_over():
    if not has_varlen():
        pytest.skip("torch 2.11 has it first")
    varlen = importlib.import_module("torch.nn.attention.varlen")
    assert attention_module._varlen_attn() is varlen.varlen_attn
    q = torch.zeros(4, 1, 8)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    inspect.signature(varlen.varlen_attn).bind(q, q, q, starts, starts, 4, 4, window_size=(-1, 0))


# --- a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize("case", ["ragged", "a PAD tail", "a row of PAD", "parts of 128"])
def test_flex_and_sdpa_train_alike_on_cuda(case, causal):
    doc_ids, results = CASES[case].cuda(), []
    for backend in ("sdpa", "flex"):
        segments = segments_from_doc_ids(doc_ids, causal=causal, backend=backend)
        attend = functools.partial(attention, segments=segments)
        results.append(result_and_gradients(attend, doc_ids, head_dim=64, device="cuda"))
    for sdpa, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, sdpa, atol=2e-2, rtol=2e-2)  # TF32 products


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
def test_varlen_trains_as_the_plain_loop_does(case, causal, ids_on):
    doc_ids, cuda = CASES[case], torch.device("cuda")
    segments = segments_from_doc_ids(
        doc_ids.to(ids_on), causal=causal, backend="varlen", device=cuda
    )

    def in_16_bit(q, k, v):
        return attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), segments).float()

    shape = {"head_dim": 64, "device": "cuda"}
    ours = result_and_gradients(in_16_bit, doc_ids, **shape)
    plain = result_and_gradients(
        lambda q, k, v: loop_over_documents(q, k, v, doc_ids, causal), doc_ids, **shape
    )
    for fast, slow in zip(ours, plain, strict=True):
        torch.testing.assert_close(fast, slow, atol=3e-2, rtol=3e-2)


@CAUSAL
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "loop"])
def test_products_in_bf16_are_near_those_of_fp32(backend, case, causal):
    doc_ids = CASES[case]
    plain = result_and_gradients(
        lambda q, k, v: loop_over_documents(q, k, v, doc_ids, causal), doc_ids
    )
    segments = segments_from_doc_ids(doc_ids, causal=causal, backend=backend, dtype=torch.bfloat16)

    def in_bf16(q, k, v):
        return attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), segments).float()

    ours = result_and_gradients(in_bf16, doc_ids)
    for fast, slow in zip(ours, plain, strict=True):
        assert (fast - slow).norm() <= 0.02 * slow.norm() + 1e-6


def test_products_do_not_depend_on_how_many_scores_are_made_at_once(monkeypatch):
    q, k, v = (x.bfloat16() for x in qkv(3, 40))
    grad, mask = torch.ones_like(q), a_mask(3, 40)

    def result_and_its_gradients(seen, causal):
        out = dense_attention.attend_by_products(q, k, v, seen, causal=causal)
        return out, *dense_attention.gradients_by_products(grad, q, k, v, seen, causal=causal)

    for seen, causal in ((mask, False), (mask[:1], False), (None, False), (None, True)):
        whole = result_and_its_gradients(seen, causal)
        monkeypatch.setattr(dense_attention, "SCORES_AT_ONCE", 1)
        single = result_and_its_gradients(seen, causal)
        monkeypatch.undo()
        for a, b in zip(whole, single, strict=True):
            close(a, b, atol=2e-2, rtol=2e-2)
