"""Newton-Schulz: the singular values of a matrix moved towards 1.

With A = X X^T and P = a I + b A + c A^2, a step is X <- P X. Two orders of work, one result:

    orthogonalise           all matrices of a shape in one call, by matrix products alone: what a
                            GPU wants, and what small matrices want
    orthogonalise_spectral  one matrix at a time. All steps together multiply X by a polynomial of
                            the first A; on the eigenvalues of A that is arithmetic on numbers, and
                            one decomposition costs less than the products of five steps
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffurefill.runtime import cpu_has_amx, has_bf16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's: the steepest start, at the price of ending near 1 and not at it."""
STEPS = 5
EPS = 1e-7

LARGE_FROM = 256
"""Short side from which a matrix on CPU is better done by itself than in a batch, which would leave
the cache; and from which a decomposition in fp32 is cheaper than the products it replaces."""
PANEL = 64
"""Rows of one panel of a symmetric product."""


class Iteration(NamedTuple):
    """Which polynomial, how often, and in which arithmetic."""

    coefficients: tuple[float, float, float] = COEFFICIENTS
    steps: int = STEPS
    eps: float = EPS
    """Added to the Frobenius norm, so that a zero matrix stays zero."""
    dtype: torch.dtype | None = None
    """None: bf16 where the hardware has it, else fp32."""

    def dtype_on(self, device: torch.device) -> torch.dtype:
        return self.dtype or (torch.bfloat16 if has_bf16(device) else torch.float32)


DEFAULT = Iteration()


def orthogonalise(matrices: Tensor, iteration: Iteration = DEFAULT) -> Tensor:
    """Move the singular values of `matrices` (rows, cols) or (n, rows, cols) towards 1; scale-free.

    The result, in the iteration's dtype, is near an orthogonal matrix, not one: with the default
    polynomial most singular values end in [0.65, 1.2].
    """
    a, b, c = iteration.coefficients
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    x = matrices.to(iteration.dtype_on(matrices.device))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # the Gram matrix is then the smaller one
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + iteration.eps)
    for _ in range(iteration.steps):
        gram = x @ x.mT
        # a x + (b gram + c gram^2) x
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def one_by_one(shape: tuple[int, int], device: torch.device) -> bool:
    """Whether matrices of `shape` are better done by `orthogonalise_one` than in a batch."""
    return device.type == "cpu" and min(shape) >= LARGE_FROM


def orthogonalise_one(matrix: Tensor, iteration: Iteration = DEFAULT) -> Tensor:
    """`orthogonalise` of one large `matrix` (rows, cols) on CPU, the faster way."""
    rows, cols = matrix.shape
    pays = spectral_pays((rows, cols), iteration.dtype_on(matrix.device))
    return (orthogonalise_spectral if pays else orthogonalise)(matrix, iteration)


def spectral_pays(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether `orthogonalise_spectral` is the faster way for a large matrix of `shape` on CPU.

    In bf16 only where it is oblong, as the decomposition itself stays in fp32, and very oblong
    where the CPU has matrix units for bf16 (that number is reckoned, not measured).
    """
    if dtype == torch.bfloat16:
        return max(shape) >= (10 if cpu_has_amx() else 2) * min(shape)
    return dtype == torch.float32


def orthogonalise_spectral(matrix: Tensor, iteration: Iteration = DEFAULT) -> Tensor:
    """`orthogonalise` of one `matrix` (rows, cols), to rounding.

    The iteration's dtype is that of the last product; rounded to bf16 before the decomposition, a
    matrix that is nearly of low rank would lose its smaller half.
    """
    dtype, tall = iteration.dtype_on(matrix.device), matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.promote_types(dtype, torch.float32))
    if tall:
        x = x.mT
    gram = x.new_empty(len(x), len(x))
    symmetric_product(x, x.mT, gram)
    x = x.to(dtype)
    # The norm divides numbers here, and never the matrix: a pass over it saved.
    norm = gram.trace().sqrt().double() + iteration.eps
    # Not finite: NaN everywhere, for LAPACK would raise and the caller's own check of the loss says
    # more. Without a branch, as where memory is predicted there are no numbers to branch on.
    norm = norm.where(norm.isfinite(), torch.nan)
    gram.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    values, vectors = torch.linalg.eigh(gram)
    factors = _composed(values / norm.square(), iteration) / norm
    product = torch.empty_like(vectors)
    symmetric_product(vectors * factors.to(vectors.dtype), vectors.mT, product)
    x = product.to(x.dtype) @ x
    return x.mT if tall else x


def _composed(values: Tensor, iteration: Iteration) -> Tensor:
    """What all steps multiply a singular vector by, given the eigenvalues (m,) of X X^T."""
    a, b, c = iteration.coefficients
    values = values.clamp(min=0.0)  # below zero by rounding alone, and the steps would enlarge it
    factors = torch.ones_like(values)
    for _ in range(iteration.steps):
        factor = a + b * values + c * values.square()
        factors, values = factors * factor, values * factor.square()
    return factors


def symmetric_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out <- left right, of which the caller knows that it is symmetric.

    left (m, k), right (k, m), out (m, m), another tensor than the two. Only panels from the
    diagonal on are computed, and mirrored: (1 + PANEL / m) / 2 of the operations.
    """
    for start in range(0, len(left), PANEL):
        stop = min(start + PANEL, len(left))
        torch.mm(left[start:stop], right[:, start:], out=out[start:stop, start:])
        out[stop:, start:stop].copy_(out[start:stop, stop:].mT)
