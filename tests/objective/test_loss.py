import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import ObjectiveConfig
from diffurefill.objective.corruption import corrupt
from diffurefill.objective.loss import masked_cross_entropy, token_cross_entropy, token_weights

LOSSES = ["pooled", "row", "elbo"]
V = 7


def random_step(num_rows, num_positions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    t = 0.15 + 0.85 * torch.rand(num_rows, generator=generator)
    is_masked = torch.rand(num_rows, num_positions, generator=generator) < t[:, None]
    return is_masked, t, torch.full((num_rows,), num_positions)


def weights_of(is_masked, t, num_eligible, loss):
    """Without short rows: every row is one part."""
    parts = torch.arange(len(is_masked))[:, None].expand_as(is_masked)
    return token_weights(is_masked, parts, t, num_eligible, loss)


def reference_loss(ce, is_masked, t, num_eligible, loss):
    """The formulas of the spec, row by row; ce (B, T)."""
    rows = [(ce[b][is_masked[b]], t[b].item()) for b in range(len(ce))]
    rows = [(values, rate) for values, rate in rows if len(values)]
    if loss == "pooled":
        return sum(v.sum() for v, _ in rows) / sum(len(v) for v, _ in rows)
    if loss == "row":
        return sum(v.mean() for v, _ in rows) / len(rows)
    return sum(v.sum() / rate for v, rate in rows) / num_eligible.sum()


@pytest.mark.parametrize("loss", LOSSES)
@given(seed=st.integers(0, 999), num_rows=st.integers(1, 6))
def test_weights_reproduce_the_formulas(loss, seed, num_rows):
    step = random_step(num_rows, 9, seed)
    step[0][0] |= torch.arange(9) == 0  # never all empty
    step[0][1:2] = False  # a row without a mask
    ce = torch.rand(num_rows, 9, generator=torch.Generator().manual_seed(seed + 1)) * 10
    weights = weights_of(*step, loss)
    assert weights.dtype == torch.float32
    expected = reference_loss(ce, *step, loss)
    torch.testing.assert_close((weights * ce).sum(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", ["pooled", "row"])
def test_the_uniform_predictor_has_exactly_ln_v(loss):
    is_masked, t, num_eligible = random_step(16, 32)
    is_masked[3] = False
    weights = weights_of(is_masked, t, num_eligible, loss)
    num_masked = int(is_masked.sum())
    targets = torch.randint(V, (num_masked,), generator=torch.Generator().manual_seed(0))
    value, _ = masked_cross_entropy(torch.zeros(num_masked, V), targets, weights[is_masked])
    assert value.item() == pytest.approx(math.log(V), rel=1e-6)


def test_the_uniform_predictor_has_ln_v_in_expectation_under_elbo():
    config = ObjectiveConfig(t_min=0.0, prefix_rows=0.0, loss="elbo")
    ids = np.zeros((20_000, 32), dtype=np.int64)
    keys = [("test", row) for row in range(len(ids))]
    none, lengths = ids.astype(np.int32), np.full(len(ids), 32, dtype=np.int32)
    arrays = SimpleNamespace(ids=ids, doc_ids=none, span_ids=none, part_lengths=lengths)
    rows = corrupt(arrays, config, keys=keys, mask_id=9, bos_id=1)
    weights = weights_of(rows.is_masked, rows.t, rows.num_eligible, "elbo")
    # Every ce is ln V, so the loss is ln V times the sum of the weights.
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-2)


def test_all_masks_of_four_positions_reproduce_the_elbo():
    """E over t and masks of the elbo loss is the chain-rule bound: the mean over sizes k of the
    mean ce over all masks of size k, because int t^(k-1) (1-t)^(4-k) dt = B(k, 5-k)."""
    L = 4
    masks = [torch.tensor(m) for m in itertools.product([False, True], repeat=L) if any(m)]
    generator = torch.Generator().manual_seed(0)
    ce = {tuple(m.tolist()): torch.rand(L, generator=generator) * 5 for m in masks}
    by_size = [
        torch.stack([ce[tuple(m.tolist())][m].mean() for m in masks if m.sum() == k]).mean()
        for k in range(1, L + 1)
    ]
    bound = torch.stack(by_size).mean().item()

    nodes, quadrature = np.polynomial.legendre.leggauss(8)  # exact for these polynomials in t
    total = 0.0
    for t, share in zip((nodes + 1) / 2, quadrature / 2, strict=True):
        for mask in masks:
            k = int(mask.sum())
            weights = weights_of(mask[None], torch.tensor([t]), torch.tensor([L]), "elbo")[0]
            loss = (weights * ce[tuple(mask.tolist())]).sum().item()
            total += share * t**k * (1 - t) ** (L - k) * loss
    assert total == pytest.approx(bound, rel=1e-5)


def test_elbo_weighs_a_mask_at_rate_015_by_667():
    weights = weights_of(
        torch.tensor([[True, False]]), torch.tensor([0.15]), torch.tensor([1]), "elbo"
    )
    assert weights.tolist() == [[pytest.approx(6.67, abs=0.01), 0.0]]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_without_masks_has_zero_weights(loss):
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    weights = weights_of(nothing, torch.full((3,), 0.5), torch.zeros(3).long(), loss)
    assert (weights == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_do_not_depend_on_the_micro_batches(loss):
    is_masked, t, num_eligible = random_step(64, 16)
    is_masked[8:16] = False  # a whole micro-batch without masks
    weights = weights_of(is_masked, t, num_eligible, loss)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 16, 5, generator=generator)
    targets = torch.randint(V, (64, 16), generator=generator)

    def gradient(micro_batch_rows):
        head = torch.linspace(-1, 1, 5 * V).view(5, V).requires_grad_()
        for i in range(0, 64, micro_batch_rows):
            rows = slice(i, i + micro_batch_rows)
            at = is_masked[rows]
            logits = inputs[rows][at] @ head
            masked_cross_entropy(logits, targets[rows][at], weights[rows][at])[0].backward()
        return head.grad

    whole = gradient(64)
    assert whole.abs().max() > 0.01
    for micro_batch_rows in (8, 4):
        torch.testing.assert_close(gradient(micro_batch_rows), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", ["pooled", "elbo"])
def test_packing_does_not_change_the_loss(loss):
    is_masked, _, _ = random_step(4, 6)
    t = torch.full((4,), 0.5)
    apart = weights_of(is_masked, t, torch.full((4,), 6), loss)
    packed = weights_of(is_masked.view(2, 12), t[:2], torch.full((2,), 12), loss)
    torch.testing.assert_close(packed.view(4, 6), apart)


def test_no_masked_positions_give_zero_and_a_zero_gradient():
    logits = torch.zeros(0, V, requires_grad=True)
    value, _ = masked_cross_entropy(logits, torch.zeros(0).long(), torch.zeros(0))
    assert value.item() == 0.0
    value.backward()
    assert logits.grad.shape == (0, V)


def test_16_bit_logits_are_scored_in_fp32():
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(50, 400, generator=generator)).bfloat16()
    targets = torch.randint(400, (50,), generator=generator)
    ce = token_cross_entropy(logits, targets)
    exact = -logits.double().log_softmax(-1)[torch.arange(50), targets]
    assert ce.dtype == torch.float32
    torch.testing.assert_close(ce.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_parts_of_short_rows_weigh_as_rows_of_that_length(loss):
    is_masked, t, num_eligible = random_step(8, 6)
    apart = weights_of(is_masked, t, num_eligible, loss)
    parts = torch.arange(8)[:, None].expand(8, 6).reshape(2, 24)
    short = token_weights(is_masked.reshape(2, 24), parts, t, num_eligible, loss)
    torch.testing.assert_close(short.reshape(8, 6), apart)
