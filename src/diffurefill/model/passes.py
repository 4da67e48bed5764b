"""The parts of a block that are no matrix products: norm, rotary turn, SwiGLU.

Each reads and writes whole activations. Written as formulas, eager PyTorch goes over them once per
elementary operation, and its backward of `rms_norm` on CPU alone took several times as long as it
has to. So on CPU, eager, forward and backward are written out here in as few passes as torch's own
operators allow, in fp32 and bf16. A compiler finds better ones in the formulas, which are what
every other case takes. Both agree to rounding. Shape letters as in denoiser.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype."""
    if _by_hand(x):
        return _run(_RMSNorm, x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, (..., F), of `gate_up` (..., 2 F)."""
    if _by_hand(gate_up):
        return _run(_SwiGLU, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotated(qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, K) of `qkv` (B, T, 3, H, K), q and k turned by `rotary` (2, T, K / 2), or
    (2, B, 1, T, K / 2)."""
    if _by_hand(qkv):
        return _run(_Rotated, qkv, rotary)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return rotate(q, rotary), rotate(k, rotary), v


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """`x` (B, H, T, K) turned by its positions, in fp32; dimension i is paired with i + K / 2."""
    cos, sin = rotary  # (T, K / 2) each, or (B, 1, T, K / 2) where rows stand apart; fp32
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _by_hand(x: Tensor) -> bool:
    known = x.dtype in (torch.float32, torch.bfloat16)
    return x.device.type == "cpu" and known and not torch.compiler.is_compiling()


def _run(function: Any, *args: Any) -> Any:
    """`function.apply(*args)`. Without gradients its forward alone: what autograd does around it is
    a part of a small model's pass that can be seen."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_Unkept(), *args)


class _Unkept:
    """In place of the context in which a forward keeps what its backward needs."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # One pass gives the norms: |x| / sqrt(D) is the root of the mean square.
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None]:  # pyrefly: ignore[bad-override]
        (grad,) = grad_outputs
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        product = grad * unit
        flat = product.flatten(0, -2)
        weight_grad = flat.sum(0)
        with torch.autocast("cpu", enabled=False):
            along = flat.mv(weight).view_as(scale).div_(x.shape[-1])
        # (grad * weight - unit * along) * scale, in the memory of a product that is done with
        x_grad = torch.mul(grad, weight, out=product).addcmul_(unit, along, value=-1.0)
        return x_grad.mul_(scale), weight_grad, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:  # pyrefly: ignore[bad-override]
        (grad,) = grad_outputs
        gate_up, opened = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        both = torch.empty_like(gate_up)
        gate_grad, up_grad = both.chunk(2, dim=-1)  # views: nothing is put together afterwards
        torch.mul(grad, opened, out=up_grad)
        torch.mul(grad, up, out=gate_grad)
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        return both


class _Rotated(torch.autograd.Function):
    """Turns in fp32 whatever comes in, as `rotate` does."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _, H, K = qkv.shape
        ctx.save_for_backward(rotary)
        turned = rotary.new_empty(2, B, H, T, K)
        _turn(qkv[:, :, :2].permute(2, 0, 3, 1, 4).float(), rotary, 1.0, turned)
        q, k = turned.to(qkv.dtype)
        return q, k, qkv[:, :, 2].transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        (rotary,) = ctx.saved_tensors
        B, H, T, K = grad_outputs[0].shape
        joint = rotary.new_empty(B, T, 3, H, K)
        q_grad, k_grad, v_grad = joint.permute(2, 0, 3, 1, 4)
        _turn(grad_outputs[0].float(), rotary, -1.0, q_grad)
        _turn(grad_outputs[1].float(), rotary, -1.0, k_grad)
        v_grad.copy_(grad_outputs[2])
        return joint.to(grad_outputs[0].dtype), None


def _turn(x: Tensor, rotary: Tensor, direction: float, out: Tensor) -> None:
    """out (..., T, K) <- `x` turned forward (1) or back (-1), which is a turn's gradient."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    low, high = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=high).addcmul_(first, sin, value=direction)
