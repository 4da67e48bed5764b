import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill import runtime
from diffurefill.optim import newton_schulz
from diffurefill.optim.newton_schulz import (
    Iteration,
    one_by_one,
    orthogonalise,
    orthogonalise_spectral,
    spectral_pays,
    symmetric_product,
)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_newton_schulz(matrix, coefficients=(3.4445, -4.7750, 2.0315), steps=5, eps=1e-7):
    """One matrix, as the published pseudocode has it."""
    a, b, c = coefficients
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


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


@pytest.mark.parametrize("way", [lambda m: orthogonalise(m[None])[0], orthogonalise_spectral])
def test_the_size_of_the_gradient_does_not_matter(way):
    matrix = randn(24, 48)
    torch.testing.assert_close(way(1e-4 * matrix), way(matrix), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(8, 8), (8, 24)])
def test_a_zero_gradient_moves_nothing(shape):
    assert (orthogonalise(torch.zeros(1, *shape)) == 0).all()
    assert (orthogonalise_spectral(torch.zeros(shape)) == 0).all()


def test_coefficients_steps_and_dtype_are_those_asked_for():
    matrix, coefficients = randn(20, 50), (2.0, -1.5, 0.5)
    iteration = Iteration(coefficients, steps=3, eps=1.0, dtype=torch.float64)
    expected = plain_newton_schulz(matrix.double(), coefficients, 3, 1.0)
    found = orthogonalise(matrix[None], iteration)[0]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)
    spectral = orthogonalise_spectral(matrix, iteration)
    torch.testing.assert_close(spectral, expected)


# 300 and 130 leave a last panel that is not full.
SHAPES = [(256, 256), (130, 140), (130, 300), (300, 130), (256, 520)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [None, 4])
def test_by_the_spectrum_equals_the_plain_iteration(shape, rank):
    """2e-3 of the norm against fp64. Gradients are nearly of low rank: singular values of 1e-4 of
    the largest lie where the polynomial is steepest, and there bf16 is 0.7 of the norm away."""
    matrix = randn(*shape)
    if rank is not None:
        low = randn(shape[0], rank, seed=1) @ randn(rank, shape[1], seed=2)
        matrix = low + 1e-3 * matrix
    expected = plain_newton_schulz(matrix.double())
    assert relative(orthogonalise_spectral(matrix), expected) < 2e-3


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_any_number_of_steps_by_the_spectrum_equals_the_plain_iteration(steps):
    for shape in ((32, 32), (32, 90)):
        matrix = randn(*shape)
        expected = plain_newton_schulz(matrix.double(), steps=steps)
        assert relative(orthogonalise_spectral(matrix, Iteration(steps=steps)), expected) < 1e-4


@given(m=st.integers(1, 40), k=st.integers(1, 20), panel=st.integers(1, 50))
@settings(deadline=None, max_examples=40)
def test_a_symmetric_product_equals_the_product(m, k, panel):
    x = randn(m, k, seed=m)
    gram, out = x @ x.mT, torch.full((m, m), float("nan"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(newton_schulz, "PANEL", panel)
        symmetric_product(x, x.mT, out)
        torch.testing.assert_close(out, gram, atol=1e-4, rtol=1e-4)
        assert (out - out.mT).abs().max() < 1e-4  # within a panel each half is computed


def test_in_bf16_the_spectrum_keeps_the_accuracy_of_torch():
    """Against fp64 as near as the iteration in bf16, and not nearer by a slip into fp32."""
    matrix = randn(64, 256)
    expected, iteration = plain_newton_schulz(matrix.double()), Iteration(dtype=torch.bfloat16)
    found = orthogonalise_spectral(matrix, iteration)
    assert found.dtype == torch.bfloat16
    assert 1e-3 < relative(found, expected) < 1.5e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_nan_either_way(bad):
    matrix = randn(16, 32)
    matrix[3, 4] = bad
    assert orthogonalise(matrix[None]).isnan().any()
    for oblong in (matrix, matrix.mT):
        assert orthogonalise_spectral(oblong).isnan().all()
    assert orthogonalise_spectral(1e20 * randn(16, 32)).isnan().all(), "the norm's square overflows"


def test_in_bf16_the_spectrum_keeps_more_of_a_matrix_of_nearly_low_rank():
    """Than products of bf16 do: the first one is in fp32."""
    matrix = randn(64, 4, seed=1) @ randn(4, 256, seed=2) + 0.03 * randn(64, 256)
    expected, iteration = plain_newton_schulz(matrix.double()), Iteration(dtype=torch.bfloat16)
    by_products = relative(orthogonalise(matrix, iteration), expected)
    assert relative(orthogonalise_spectral(matrix, iteration), expected) < by_products


@pytest.mark.parametrize(("has_amx", "cols"), [(True, 2560), (False, 512)])
def test_where_the_cpu_has_bf16_products_may_beat_the_decomposition(monkeypatch, has_amx, cols):
    monkeypatch.setattr(runtime, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(newton_schulz, "cpu_has_amx", lambda: has_amx)
    assert Iteration().dtype_on(torch.device("cpu")) == torch.bfloat16
    assert not spectral_pays((256, cols - 1), torch.bfloat16)
    assert spectral_pays((256, cols), torch.bfloat16)
    assert spectral_pays((256, 1024), torch.float32)


def test_large_matrices_on_cpu_go_one_by_one_and_by_their_spectrum():
    cpu = torch.device("cpu")
    assert one_by_one((256, 256), cpu)
    assert not one_by_one((255, 1024), cpu)
    assert not one_by_one((256, 1024), torch.device("cuda"))
    assert spectral_pays((256, 256), torch.float32)
    assert not spectral_pays((256, 256), torch.bfloat16)
    assert not spectral_pays((256, 1024), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_by_one_gives_what_a_batch_gives(dtype):
    matrix, iteration = randn(24, 40, dtype=torch.float64), Iteration(dtype=dtype)
    alone, among = orthogonalise(matrix, iteration), orthogonalise(matrix[None], iteration)[0]
    assert alone.shape == matrix.shape
    assert relative(alone, among) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
