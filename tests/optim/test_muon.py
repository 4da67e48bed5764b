import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.optim.muon import Muon, orthogonalise


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_newton_schulz(matrix):
    """One matrix, as the published pseudocode has it."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def plain_muon(weight, grads, *, lr, weight_decay, pieces):
    """Momentum by the sum form, every piece by itself, one update after the other."""
    buffer = torch.zeros_like(weight)
    for grad in grads:
        buffer = 0.95 * buffer + grad
        direction = grad + 0.95 * buffer
        update = torch.cat([plain_newton_schulz(d) for d in direction.chunk(pieces)])
        rows, cols = weight.shape[0] // pieces, weight.shape[1]
        weight = weight * (1 - lr * weight_decay) - lr * 0.2 * max(rows, cols) ** 0.5 * update
    return weight


@pytest.mark.parametrize("shape", [(32, 64), (96, 32), (48, 256)])
@given(seed=st.integers(0, 999))
@settings(deadline=None, max_examples=10)
def test_singular_values_of_oblong_matrices_come_near_one(shape, seed):
    values = torch.linalg.svdvals(orthogonalise(randn(3, *shape, seed=seed)))
    assert values.min() >= 0.65
    assert values.max() <= 1.20


def test_singular_values_of_square_matrices_come_near_one_but_for_the_smallest():
    values = torch.linalg.svdvals(orthogonalise(randn(4, 96, 96)))
    assert values.max() <= 1.25
    assert abs(values.median().item() - 0.93) <= 0.08


def test_a_batch_is_orthogonalised_matrix_by_matrix():
    matrices = randn(5, 40, 24)
    expected = torch.stack([plain_newton_schulz(m) for m in matrices])
    torch.testing.assert_close(orthogonalise(matrices), expected, atol=1e-5, rtol=1e-4)


def test_the_size_of_the_gradient_does_not_matter():
    matrices = randn(2, 24, 48)
    small = orthogonalise(1e-4 * matrices)
    torch.testing.assert_close(small, orthogonalise(matrices), atol=1e-3, rtol=1e-3)


def test_a_zero_gradient_moves_nothing():
    assert (orthogonalise(torch.zeros(1, 8, 8)) == 0).all()


@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 176)])
def test_an_update_has_the_rms_of_adamw(shape):
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = randn(*shape)
    Muon([weight], lr=1.0).step()
    assert 0.17 <= weight.detach().square().mean().sqrt().item() <= 0.20


def test_several_steps_on_mixed_shapes_equal_a_plain_loop():
    # The pieces of the first are as large as the second and share its batch.
    shapes, pieces = [(72, 24), (24, 24), (80, 24), (24, 40)], [3, 1, 2, 1]
    weights = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    groups = [{"params": [p], "num_pieces": n} for p, n in zip(parameters, pieces, strict=True)]
    optimizer = Muon(groups, lr=0.02, weight_decay=0.1)
    grads = [[randn(*w.shape, seed=10 * i + s) for s in range(4)] for i, w in enumerate(weights)]
    for step in range(4):
        for parameter, own in zip(parameters, grads, strict=True):
            parameter.grad = own[step].clone()
        optimizer.step()
    for parameter, weight, own, n in zip(parameters, weights, grads, pieces, strict=True):
        expected = plain_muon(weight, own, lr=0.02, weight_decay=0.1, pieces=n)
        torch.testing.assert_close(parameter.detach(), expected, atol=2e-4, rtol=1e-3)


def test_updates_agree_with_torch_muon():
    torch_muon = getattr(torch.optim, "Muon", None)
    if torch_muon is None:
        pytest.skip("this torch has no Muon")
    ours, theirs = (torch.nn.Parameter(randn(40, 64)) for _ in range(2))
    settings_ = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    pair = (
        (ours, Muon([ours], **settings_)),
        (theirs, torch_muon([theirs], adjust_lr_fn="match_rms_adamw", **settings_)),
    )
    start = ours.detach().clone()
    for step in range(3):
        for parameter, optimizer in pair:
            parameter.grad = randn(40, 64, seed=step)
            optimizer.step()
    moved, expected = ours.detach() - start, theirs.detach() - start
    assert (moved - expected).norm() < 0.05 * expected.norm()  # theirs rounds to bf16


def test_a_parameter_without_a_gradient_stays():
    weight = torch.nn.Parameter(randn(8, 8))
    before = weight.detach().clone()
    Muon([weight], lr=1.0).step()
    assert torch.equal(weight, before)
