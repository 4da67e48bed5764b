"""Blocks compiled one by one: where that is done, and what happens where it cannot be.

One graph serves all blocks but the last, and one the last. Their sizes that change from step to
step, the number of masked positions and of documents, are left open, so that a run compiles in its
first steps and never again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from diffurefill.model.backends import hardware_of
from diffurefill.model.denoiser import EAGER, BlockCalls, Denoiser, call_block, call_last_block
from diffurefill.model.segments import Ranges, Segments

Choice = Literal["auto", "on", "off"]
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILERS = ("g++", "clang++", "c++")


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
    if isinstance(segments.mask, Ranges):
        torch._dynamo.maybe_mark_dynamic(segments.mask.table, 0)
