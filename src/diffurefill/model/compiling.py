"""Blocks compiled one by one: where that is done, and what happens where it cannot be.

One graph serves all blocks but the last, and one the last. Sizes that change are left open: in
training the number of masked positions and of documents, in writing all. So a run compiles in its
first steps, a writer in its first passes, and hardly ever again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.model.backends import hardware_of
from diffurefill.model.denoiser import EAGER, BlockCalls, Denoiser, call_block, call_last_block
from diffurefill.model.segments import Packed, Ranges, Segments

Choice = Literal["auto", "on", "off"]
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILERS = ("g++", "clang++", "c++")
WITHOUT = "write without --compile (in Python, without compile=True)"


def why_eager(device: torch.device, choice: Choice) -> str | None:
    """Why blocks run eagerly on `device`, in words for a log; None where they are compiled."""
    if choice == "off":
        return "train.compile is off"
    hardware = hardware_of(device)
    if hardware.type == "cuda":
        if hardware.capability < (8, 0):
            return "compiled blocks need a GPU of sm_80 or later"
        return None
    if choice == "auto":
        return "on CPU blocks are compiled only with train.compile = on"
    if os.environ.get("CXX") is None and not any(map(shutil.which, COMPILERS)):
        return f"no C++ compiler on this machine (one of {', '.join(COMPILERS)}, or set CXX)"
    return None


def compile_blocks(model: Denoiser, *, backend: str = "inductor") -> None:
    """Let training run `model`'s blocks as compiled graphs; the compiling itself comes with the
    first steps. Names of parameters stay as they are.

    `backend`: of torch.compile; tests count graphs with a cheap one.
    """
    keep_compiled_code()
    # dynamic=False: sizes are constants, but for those that are marked as open.
    inner = torch.compile(call_block, dynamic=False, backend=backend)
    last = torch.compile(call_last_block, dynamic=False, backend=backend)

    def run_inner(block: Any, x: Tensor, rotary: Tensor, segments: Segments) -> Tensor:
        _leave_open(segments)
        return inner(block, x, rotary, segments)

    def run_last(
        block: Any, x: Tensor, rotary: Tensor, segments: Segments, wanted: Tensor | None
    ) -> Tensor:
        _leave_open(segments)
        if wanted is not None:
            torch._dynamo.maybe_mark_dynamic(wanted, 0)
        return last(block, x, rotary, segments, wanted)

    model.training_calls = BlockCalls(run_inner, run_last)


def compile_for_writing(model: Denoiser, *, backend: str = "inductor") -> None:
    """Let passes without gradients run `model`'s blocks as compiled graphs; the compiling itself
    comes with the first passes.

    A row alone and several, whole rows and such with padding, have graphs of their own: a few in
    all, whatever the sizes. On a GPU the inner blocks become CUDA graphs, one for each size.
    Raises UserError where nothing can be compiled: at once, or in the first pass.
    """
    if model.config.causal:
        raise UserError(f"a causal model writes with its past kept, eagerly: {WITHOUT}")
    device = model.embedding.weight.device
    reason = why_eager(device, "on")
    if reason is not None:
        raise UserError(f"{reason}: {WITHOUT}")
    keep_compiled_code()
    on_gpu = device.type == "cuda"
    mode = "reduce-overhead" if on_gpu else None
    inner = torch.compile(call_block, dynamic=True, backend=backend, mode=mode)
    # What it returns outlives the pass, and its sizes change in each: no CUDA graph.
    last = torch.compile(call_last_block, dynamic=True, backend=backend)
    first_block = model.blocks[0]

    def run_inner(block: Any, *args: Any) -> Tensor:
        if on_gpu and block is first_block:
            # What the CUDA graphs of the pass before have put out may be written over.
            torch.compiler.cudagraph_mark_step_begin()
        return _or_refuse(inner, block, *args)

    def run_last(
        block: Any, x: Tensor, rotary: Tensor, segments: Segments, wanted: Tensor | None
    ) -> Tensor:
        if wanted is not None and len(wanted) == 1:  # a size of one would be another graph
            return _or_refuse(last, block, x, rotary, segments, wanted.repeat(2))[:1]
        return _or_refuse(last, block, x, rotary, segments, wanted)

    model.writing_calls = BlockCalls(run_inner, run_last)


def _or_refuse(compiled: Callable[..., Tensor], *args: Any) -> Tensor:
    try:
        return compiled(*args)
    except RuntimeError as error:
        reason = why_not_compiled(error)
        if reason is None:
            raise
        raise UserError(f"blocks do not compile here ({reason}): {WITHOUT}") from error


def run_eagerly(model: Denoiser) -> None:
    model.training_calls = EAGER


def why_not_compiled(error: BaseException) -> str | None:
    """What went wrong in compiling, in a line; None where `error` came of something else."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    cause = getattr(error, "inner_exception", None) or error
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


def keep_compiled_code() -> Path:
    """Have torch keep compiled code in `code_folder`, which is returned."""
    folder = code_folder()
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder


def code_folder() -> Path:
    """Where compiled code is kept. Torch's own folder is below the temporary one, which does not
    outlive a machine's restart; a user's choice stands."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "diffurefill" / "compiled"


def _leave_open(segments: Segments) -> None:
    tables: tuple[Tensor, ...] = ()
    if isinstance(segments.mask, Ranges):
        tables = segments.mask
    elif isinstance(segments.mask, Packed):
        tables = (segments.mask.cu_seqlens,)
    for table in tables:
        torch._dynamo.maybe_mark_dynamic(table, 0)
