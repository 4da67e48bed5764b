"""Chunks of positions give the loss and the gradients of all logits at once, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from diffurefill.objective.head import CHUNK_BYTES, chunk_rows, head_cross_entropy
from diffurefill.objective.loss import masked_cross_entropy

V, D = 50, 12


def case(num_positions: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_positions, D, generator=generator).to(dtype).requires_grad_()
    head = (0.3 * torch.randn(V, D, generator=generator)).requires_grad_()
    targets = torch.randint(V, (num_positions,), generator=generator)
    weights = torch.rand(num_positions, generator=generator)
    return hidden, head, targets, weights


def chunked(hidden, head, targets, weights, rows):
    copy = None if hidden.dtype == head.dtype else head.detach().to(hidden.dtype)
    size = rows * 8 * V
    return head_cross_entropy(hidden, head, targets, weights, cast=copy, chunk_bytes=size)


@pytest.mark.parametrize("rows", [1, 5, 17, 40, 1000])
def test_chunks_equal_the_plain_loss_and_its_gradients(rows: int) -> None:
    hidden, head, targets, weights = case(40)
    value, ce = masked_cross_entropy(hidden @ head.T, targets, weights)
    expected = torch.autograd.grad(3.0 * value, (hidden, head))
    ours, ours_ce = chunked(hidden, head, targets, weights, rows)
    assert not ours_ce.requires_grad
    torch.testing.assert_close(ours, value, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(ours_ce, ce, atol=1e-5, rtol=1e-6)
    found = torch.autograd.grad(3.0 * ours, (hidden, head))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_no_positions_give_zero_and_zero_gradients() -> None:
    hidden, head, targets, weights = case(0)
    value, ce = chunked(hidden, head, targets, weights, 8)
    assert (value.item(), ce.shape) == (0.0, (0,))
    value.backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, D)
    assert head.grad is not None
    assert not head.grad.any()


def test_the_gradient_of_the_head_adds_up_in_fp32_for_16_bit_products() -> None:
    hidden, head, targets, weights = case(600, torch.bfloat16)
    value, _ = chunked(hidden, head, targets, weights, 64)
    value.backward()
    exact_hidden, exact_head, *_ = case(600)
    exact, _ = masked_cross_entropy(exact_hidden @ exact_head.T, targets, weights)
    exact.backward()
    assert head.grad is not None
    assert hidden.grad is not None
    assert head.grad.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16
    assert value.item() == pytest.approx(exact.item(), rel=1e-2)
    difference = (head.grad - exact_head.grad).norm() / exact_head.grad.norm()
    assert difference < 1e-2


def test_rows_of_weight_zero_leave_no_gradient_behind() -> None:
    hidden, head, targets, weights = case(20)
    weights = torch.cat((weights[:12], torch.zeros(8)))
    value, _ = chunked(hidden, head, targets, weights, 7)
    value.backward()
    assert hidden.grad is not None
    assert not hidden.grad[12:].any()
    assert hidden.grad[:12].any()


def test_chunks_take_gemm_sized_multiples_where_there_is_room() -> None:
    assert chunk_rows(73_760, CHUNK_BYTES) == 1792
    assert chunk_rows(73_760, 2**20) == 1
    assert chunk_rows(1000, 8 * 1000 * 100) == 100


def test_only_a_chunk_of_logits_exists_at_a_time() -> None:
    vocab_size, positions, rows = 4000, 512, 128
    hidden = torch.randn(positions, 8, requires_grad=True)
    head = torch.randn(vocab_size, 8, requires_grad=True)
    targets, weights = torch.zeros(positions, dtype=torch.long), torch.ones(positions)

    def largest(chunk_bytes: int | None) -> int:
        """Of what the allocator held at once, by the profiler's count of live bytes."""
        head.grad = hidden.grad = None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            value, _ = head_cross_entropy(hidden, head, targets, weights, chunk_bytes=chunk_bytes)
            value.backward()
        live = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most

    chunk, rest = rows * vocab_size * 8, 3 * (head.nbytes + hidden.nbytes)
    assert largest(None) > 2 * positions * vocab_size * 4
    assert largest(chunk) < chunk + rest
