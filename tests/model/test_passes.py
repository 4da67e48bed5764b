"""What is written out by hand equals its formula, values and gradients, to rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffurefill.model import passes
from diffurefill.model.denoiser import rotary_table
from diffurefill.model.passes import rms_norm, rotated, swiglu

Pass = Callable[..., Tensor | tuple[Tensor, ...]]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROTARY = rotary_table(7, 6, 100.0)
CASES: dict[str, tuple[Pass, tuple[Tensor, ...]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-5), (drawn(3, 5, 24), drawn(24, seed=1))),
    "norm of chosen rows": (lambda x, w: rms_norm(x, w, 1e-5), (drawn(9, 24), drawn(24, seed=1))),
    "norm of none": (lambda x, w: rms_norm(x, w, 1e-5), (drawn(0, 24), drawn(24, seed=1))),
    "norm of zeros": (lambda x, w: rms_norm(x, w, 1e-5), (torch.zeros(2, 24), drawn(24))),
    "swiglu": (swiglu, (3.0 * drawn(3, 5, 20),)),
    "swiglu of none": (swiglu, (drawn(0, 20),)),
    "rotated": (lambda x: rotated(x, ROTARY), (drawn(2, 7, 3, 4, 6),)),
}


def run(do: Pass, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Results, then the gradients of the inputs under drawn gradients of the results."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = do(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    grads = [drawn(*x.shape, seed=9 + i).to(x.dtype) for i, x in enumerate(out)]
    return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, grads)]


@pytest.mark.parametrize("name", CASES)
def test_by_hand_equals_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    do, inputs = CASES[name]
    by_hand = run(do, inputs)
    monkeypatch.setattr(passes, "_by_hand", lambda x: False)
    for ours, plain in zip(by_hand, run(do, inputs), strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)


def test_the_hand_written_norm_is_as_exact_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(2000, 64), drawn(64, seed=1)
    exact = run(
        lambda x, w: torch.nn.functional.rms_norm(x, (64,), w, 1e-5), (x.double(), weight.double())
    )
    worst = [
        (a - b).abs().max() for a, b in zip(run(CASES["norm"][0], (x, weight)), exact, strict=True)
    ]
    assert worst[0] < 2e-6
    assert worst[1] < 5e-6
    assert worst[2] < 1e-4  # of a sum of 2,000 numbers, up to 150


@pytest.mark.parametrize("name", ["swiglu", "rotated"])
def test_by_hand_in_bf16_is_as_exact_as_the_formula(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, inputs = CASES[name]
    rounded = tuple(x.bfloat16() for x in inputs)
    exact = run(do, tuple(x.float() for x in rounded))
    by_hand = run(do, rounded)
    monkeypatch.setattr(passes, "_by_hand", lambda x: False)
    for ours, plain, truth in zip(by_hand, run(do, rounded), exact, strict=True):
        assert ours.dtype == plain.dtype == torch.bfloat16
        error, allowed = ((x.float() - truth).norm() for x in (ours, plain))
        assert error <= 1.05 * allowed + 1e-6


def test_other_dtypes_and_compiled_take_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes._SwiGLU, "apply", lambda *_: pytest.fail("by hand"))
    swiglu(drawn(2, 8).half())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    swiglu(drawn(2, 8))
