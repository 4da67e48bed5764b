"""What keeping documents apart costs, or saves: every backend next to attention without documents.

    python bench/attention.py [--quick]

Forward and backward of one attention call on one CPU thread, in CPU seconds: medians of interleaved
repeats (full: 15; --quick: 3); `cases` in fp32, `cases_bf16` in bf16 where this CPU has it. `ratio`
is a backend's time over that of our attention without a mask on the same q, k and v; `default` is
the backend that training takes by rule, `default_over_full` its ratio (1.0 where the rule leaves
the mask away), `torch_over_default` the time of torch's own operator without a mask over it.
`worst_default_over_full` is the largest of both precisions. Flex cannot train on CPU and varlen
does not run there: `refused` says so. On a CUDA device `fastest` adds the start-up measurement at
the shape of base-1b, in bf16.

`block_masks` builds the block mask of 8 rows of 2,048 positions from document ranges and by torch's
`create_block_mask`: milliseconds, their ratio, and whether the two are equal bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from _common import report
from diffurefill.model.attention import attention, plan_segments
from diffurefill.model.backends import BACKENDS, Shape, choose_backend, hardware_of, why_not
from diffurefill.model.fastest import fastest_backend
from diffurefill.model.segments import (
    Ranges,
    Segments,
    _segment_ids,
    documents_of,
    segments_from_doc_ids,
)
from diffurefill.runtime import has_bf16, philox, set_threads

CPU = torch.device("cpu")
FULL, TORCH = "unmasked sdpa", "torch's sdpa"
# name: rows, heads, positions, head dim, the lengths of every row's documents (the rest is PAD), or
# the mean of drawn ones, which the rows' ends cut as packing does: no row is like another.
CASES: dict[str, tuple[int, int, int, int, list[int] | int]] = {
    "B2 H8 T1024, 5 documents": (2, 8, 1024, 64, [310, 120, 260, 50, 284]),
    "B2 H8 T1024, 1 document": (2, 8, 1024, 64, [1024]),
    "B2 H8 T1024, 1 document, PAD": (2, 8, 1024, 64, [900]),
    "B2 H8 T1024, 128-token parts": (2, 8, 1024, 64, [128] * 8),
    "B2 H8 T1024, 51 documents": (2, 8, 1024, 64, [20] * 51),
    "B1 H8 T2048, 4 documents": (1, 8, 2048, 64, [700, 600, 148, 600]),
    "B4 H8 T512, 3 documents": (4, 8, 512, 64, [200, 60, 252]),
    "B4 H4 T256, 3 documents": (4, 4, 256, 64, [100, 56, 100]),
    "B4 H4 T256, 2 documents, PAD": (4, 4, 256, 64, [180, 60]),
    "B4 H4 T256, 25 documents": (4, 4, 256, 64, [10] * 25),
    "B32 H4 T128, 3 documents": (32, 4, 128, 48, [50, 30, 48]),
    "B16 H2 T128, 2 documents": (16, 2, 128, 64, [78, 50]),
    "B16 H2 T128, 5 documents, PAD": (16, 2, 128, 64, [30, 20, 30, 20, 25]),
    "B32 H4 T128, drawn, mean 20": (32, 4, 128, 48, 20),
    "B32 H4 T128, drawn, mean 50": (32, 4, 128, 48, 50),
    "B32 H4 T128, drawn, mean 200": (32, 4, 128, 48, 200),
    "B16 H2 T128, drawn, mean 50": (16, 2, 128, 64, 50),
    "B8 H4 T256, drawn, mean 60": (8, 4, 256, 64, 60),
    "B8 H3 T288, drawn, mean 300": (8, 3, 288, 64, 300),
    "B8 H8 T512, drawn, mean 150": (8, 8, 512, 64, 150),
    "B8 H8 T512, drawn, mean 2000": (8, 8, 512, 64, 2000),
}
QUICK = ("B2 H8 T1024, 5 documents", "B4 H4 T256, 3 documents")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute; writes no result")
    quick = parser.parse_args().quick
    set_threads(1)
    repeats = 3 if quick else 15
    names = QUICK if quick else CASES
    cases = {name: measured(Shape(*CASES[name][:4]), CASES[name][4], repeats) for name in names}
    figures: dict[str, Any] = {"repeats": repeats, "cases": cases, "cases_bf16": {}}
    if has_bf16(CPU):
        figures["cases_bf16"] = {
            name: measured(Shape(*CASES[name][:4], torch.bfloat16), CASES[name][4], repeats)
            for name in names
        }
    both = [*cases.values(), *figures["cases_bf16"].values()]
    figures |= {
        "worst_default_over_full": max(case["default_over_full"] for case in both),
        "block_masks": block_masks(repeats),
    }
    if torch.cuda.is_available():
        figures["fastest"] = on_cuda()
    report("attention", figures, quick=quick)


# --- one shape ------------------------------------------------------------------------------------


def measured(shape: Shape, lengths: list[int] | int, repeats: int) -> dict[str, Any]:
    make = drawn_rows if isinstance(lengths, int) else rows_of
    doc_ids, cpu = make(shape.rows, shape.positions, lengths), hardware_of(CPU)
    default = plan_segments(doc_ids, shape, CPU, causal=False, training=True)
    refusals = {name: why_not(name, cpu, shape) for name in BACKENDS}
    plans = {FULL: Segments(None, False)} | {
        name: segments_from_doc_ids(doc_ids, causal=False, backend=name, dtype=shape.dtype)
        for name, reason in refusals.items()
        if reason is None
    }
    calls = {
        name: training_call(shape, partial(attention, segments=plan))
        for name, plan in plans.items()
    }
    seconds = timed({**calls, TORCH: training_call(shape, F.scaled_dot_product_attention)}, repeats)
    ratios = {name: round(taken / seconds[FULL], 3) for name, taken in seconds.items()}
    chosen = FULL
    if default.mask is not None:
        chosen = choose_backend(cpu, shape, documents_of(doc_ids), training=True)
        assert isinstance(default.mask, Ranges) == (chosen == "loop")
    return {
        "full_ms": round(1000 * seconds[FULL], 2),
        "ratio": {name: ratio for name, ratio in ratios.items() if name not in (FULL, TORCH)},
        "default": chosen,
        "default_over_full": ratios[chosen],
        "torch_over_default": round(seconds[TORCH] / seconds[chosen], 3),
        "refused": {name: reason for name, reason in refusals.items() if reason},
    }


def training_call(shape: Shape, attend: Callable[..., Tensor]) -> Callable[[], object]:
    """Forward and backward on tensors laid out as the denoiser's: v a view of the joint product."""
    B, H, T, K, dtype = shape
    drawn = philox("bench attention", B, T).standard_normal((4, B, T, H, K), dtype="float32")
    q, k, v, gradient = (x.transpose(1, 2) for x in torch.from_numpy(drawn).to(dtype))
    inputs = [x.detach().requires_grad_() for x in (q.contiguous(), k.contiguous(), v)]

    def call() -> object:
        return torch.autograd.grad(attend(*inputs), inputs, gradient)

    return call


def rows_of(rows: int, positions: int, lengths: list[int]) -> Tensor:
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    padded = torch.nn.functional.pad(row, (0, positions - len(row)), value=-1)
    return padded.int().repeat(rows, 1)


def drawn_rows(rows: int, positions: int, mean: int) -> Tensor:
    """Documents of exponential lengths, end to end over all rows."""
    total = rows * positions
    lengths = 1 + philox("bench documents", rows, positions, mean).exponential(mean, total)
    ends = torch.from_numpy(lengths).long().cumsum(0)
    return torch.searchsorted(ends, torch.arange(total), right=True).int().view(rows, positions)


# --- block masks ----------------------------------------------------------------------------------


def block_masks(repeats: int) -> dict[str, Any]:
    rows, positions = 8, 2048
    doc_ids = rows_of(rows, positions, [700, 600, 100, 500])
    segment_ids = _segment_ids(doc_ids)

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return segment_ids[b, q] == segment_ids[b, k]

    def ours() -> BlockMask:
        mask = segments_from_doc_ids(doc_ids, causal=False, backend="flex").mask
        assert isinstance(mask, BlockMask)
        return mask

    def theirs() -> BlockMask:
        return create_block_mask(same, rows, None, positions, positions, device="cpu")

    seconds = timed({"ranges": ours, "create_block_mask": theirs}, repeats)
    return {
        **{f"{name}_ms": round(1000 * taken, 2) for name, taken in seconds.items()},
        "ratio": round(seconds["create_block_mask"] / seconds["ranges"], 1),
        "equal": all(
            torch.equal(getattr(ours(), part), getattr(theirs(), part))
            for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        ),
        "sparsity": round(ours().sparsity(), 1),
    }


# --- timing ---------------------------------------------------------------------------------------


def timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of a call, the calls by turns; a short one is repeated to 50 ms."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, int(0.05 / max(cpu_seconds(call, 1), 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(cpu_seconds(call, counts[name]))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def cpu_seconds(call: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


def on_cuda() -> dict[str, Any]:
    doc_ids = rows_of(8, 2048, [700, 600, 148, 600])
    cuda = torch.device("cuda")
    choice = fastest_backend(cuda, doc_ids, heads=16, head_dim=128, dtype=torch.bfloat16)
    return {
        "backend": choice.backend,
        "milliseconds": choice.milliseconds,
        "refused": choice.refused,
    }


if __name__ == "__main__":
    main()
