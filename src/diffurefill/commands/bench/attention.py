"""`diffurefill bench attention`: every backend on a preset's documents, beside full attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffurefill.commands.bench.shared import Bench, Call, by_turns, first_rows, require_repeats
from diffurefill.config import RunConfig

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from torch import Tensor

    from diffurefill.model.backends import Shape
    from diffurefill.model.segments import Segments

FULL = "full"


@dataclass(kw_only=True)
class BenchAttention(Bench):
    """Attention alone at a preset's shape: each backend on its documents, beside no documents."""

    repeats: int = 10
    """Timed runs; the median counts."""

    def measure(self, config: RunConfig, device: torch.device) -> dict[str, Any]:
        require_repeats(self.repeats)
        return bench_attention(config, device, self.repeats)

    def table(self, figures: dict[str, Any]) -> Table:
        return table(figures)


def bench_attention(config: RunConfig, device: torch.device, repeats: int) -> dict[str, Any]:
    import torch

    from diffurefill.model.attention import plan_segments
    from diffurefill.model.backends import BACKENDS, Shape, hardware_of, why_not
    from diffurefill.model.segments import Segments, segments_from_doc_ids
    from diffurefill.runtime import device_name, training_dtype
    from diffurefill.train.flops import visible_pairs
    from diffurefill.train.timing import backend_of

    doc_ids = first_rows(config).doc_ids[: config.train.micro_batch_rows]
    rows, positions = doc_ids.shape
    heads, causal = config.model.heads, config.model.causal
    dtype = training_dtype(device, config.train.precision) or torch.float32
    shape = Shape(rows, heads, positions, config.model.width // heads, dtype)
    ids = torch.from_numpy(doc_ids)
    refused = {name: why_not(name, hardware_of(device), shape) for name in BACKENDS}
    plans = {FULL: Segments(None, causal)} | {
        name: segments_from_doc_ids(ids, causal=causal, backend=name, device=device, dtype=dtype)
        for name, reason in refused.items()
        if reason is None
    }
    by_rule = plan_segments(ids, shape, device, causal=causal, training=True)
    pairs = {name: visible_pairs(doc_ids, causal=causal) for name in plans}
    pairs[FULL] = visible_pairs(0 * doc_ids, causal=causal)
    return {
        "device": device_name(device),
        "precision": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "shape": {"rows": rows, "heads": heads, "positions": positions, "head_dim": shape.head_dim},
        "visible_keys": round(pairs["sdpa"] / max(int((doc_ids >= 0).sum()), 1), 1),
        "by_rule": backend_of(by_rule),
        "backends": times(shape, plans, pairs, device, repeats),
        "refused": {name: reason for name, reason in refused.items() if reason},
        "repeats": repeats,
    }


def times(
    shape: Shape,
    plans: dict[str, Segments],
    pairs: dict[str, int],
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """By backend: milliseconds and TFLOP/s of what it has to compute, masked pairs left out."""
    calls: dict[str, Call] = {}
    for name, segments in plans.items():
        inputs = drawn(shape, device)
        calls[f"{name} forward"] = lambda i=inputs, s=segments: forward(i, s)
        calls[f"{name} both"] = lambda i=inputs, s=segments: forward_backward(i, s)
    seconds = by_turns(calls, device, repeats)
    found = {}
    for name in plans:
        one, both = seconds[f"{name} forward"], seconds[f"{name} both"]
        flops = 4.0 * shape.heads * shape.head_dim * pairs[name]
        found[name] = {
            "forward_ms": round(1000 * one, 3),
            "forward_backward_ms": round(1000 * both, 3),
            "forward_tflops": round(flops / one / 1e12, 4),
            "forward_backward_tflops": round(3 * flops / both / 1e12, 4),
            "over_full": round(both / seconds[f"{FULL} both"], 3),
        }
    return found


def drawn(shape: Shape, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of the result, with heads side by side in memory."""
    import torch

    from diffurefill.runtime import philox

    B, H, T, K, dtype = shape
    values = philox("bench attention", B, H, T, K).standard_normal((4, 1, T, H, K), dtype="float32")
    tensors = [x.expand(B, T, H, K).contiguous() for x in torch.from_numpy(values)]
    return [x.to(device, dtype).transpose(1, 2).requires_grad_() for x in tensors]


def forward(inputs: list[Tensor], segments: Segments) -> None:
    import torch

    from diffurefill.model.attention import attention

    q, k, v, _ = inputs
    with torch.no_grad():
        attention(q, k, v, segments)


def forward_backward(inputs: list[Tensor], segments: Segments) -> None:
    import torch

    from diffurefill.model.attention import attention

    q, k, v, gradient = inputs
    torch.autograd.grad(attention(q, k, v, segments), (q, k, v), gradient.detach())


def table(figures: dict[str, Any]) -> Table:
    from rich.table import Table

    size = figures["shape"]
    shown = Table(
        title=f"attention of {figures['preset']}: {size['rows']} rows, {size['heads']} heads, "
        f"{size['positions']} positions, head dim {size['head_dim']}",
        caption=f"{figures['device']}, {figures['precision']}; {figures['visible_keys']:,.0f} keys "
        f"seen by a token; training takes {figures['by_rule']} by rule. TFLOP/s count only pairs "
        "that may see each other",
        box=None,
    )
    for column in ("backend", "forward", "and backward", "over full", "TFLOP/s", "and backward"):
        shown.add_column(column, justify="left" if column == "backend" else "right")
    for name, f in figures["backends"].items():
        shown.add_row(
            name,
            f"{f['forward_ms']:.2f} ms",
            f"{f['forward_backward_ms']:.2f} ms",
            f"{f['over_full']:.2f}",
            f"{f['forward_tflops']:.3f}",
            f"{f['forward_backward_tflops']:.3f}",
        )
    for name, reason in figures["refused"].items():
        shown.add_row(name, f"[dim]{reason}[/dim]")
    return shown
