"""Where a training step's time goes, without a change to the step.

One part runs at any moment; hooks on the model and wrappers round a few functions say when the
next one begins. So the parts add up to the whole, and what has no name is `rest`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from diffurefill.data.loader import Loader
from diffurefill.model import denoiser
from diffurefill.model.denoiser import Denoiser
from diffurefill.model.segments import Segments
from diffurefill.optim.adamw import RunOptimizer
from diffurefill.runtime import wait_for

PARTS = (
    "waiting",
    "corrupt",
    "blocks",
    "attention",
    "head_loss",
    "backward",
    "optimiser",
    "rest",
)
"""waiting: for the loader. corrupt: masks, weights and their way to the device. blocks: embedding,
segments and blocks, attention aside. head_loss: from the final norm to the loss. optimiser: clip
and update. rest: figures for the log, gradients set to none."""


class PartClock:
    """Seconds by part. On CUDA every switch waits for the device: use it to find shares, never to
    find the speed."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.backends: Counter[str] = Counter()
        """Micro-batches by the attention backend that they took."""
        self._device, self._clock = device, clock
        self._part, self._since = "rest", clock()

    def switch(self, part: str) -> str:
        """`part` begins; returns the one that ends."""
        wait_for(self._device)
        now = self._clock()
        self.seconds[self._part] += now - self._since
        ended, self._part, self._since = self._part, part, now
        return ended

    def shares(self) -> dict[str, float]:
        """Of the time until the last switch; they add up to 1."""
        total = sum(self.seconds.values())
        return {part: seconds / total if total else 0.0 for part, seconds in self.seconds.items()}


@contextmanager
def timed_parts(
    model: Denoiser,
    optimizer: RunOptimizer,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[PartClock]:
    """Steps taken inside, with rows from any Loader, are timed by part.

    Blocks that are compiled hold attention as part of their graph: it is then counted in `blocks`.
    Everything is as it was on the way out.
    """
    parts = PartClock(device, clock)

    def during(part: str, after: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Wraps a function to run as `part`, then as `after`; None: as what ran before."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                before = parts.switch(part)
                try:
                    return function(*args, **kwargs)
                finally:
                    parts.switch(before if after is None else after)

            return timed

        return wrap

    with ExitStack() as stack:
        replace: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (Loader, "__next__", during("waiting", "corrupt")),
            (torch.autograd, "backward", during("backward", "rest")),
            (nn.utils, "clip_grad_norm_", during("optimiser", "optimiser")),
            (optimizer, "step", during("optimiser", "rest")),
            (denoiser, "plan_segments", lambda plan: _counted(plan, parts.backends)),
        ]
        if not is_compiled(model):
            replace.append((denoiser, "attention", during("attention", None)))
        for owner, name, wrap in replace:
            stack.enter_context(_replaced(owner, name, wrap))
        # The head ends where backward begins: the loss is outside of the model.
        for module, part in ((model.embedding, "blocks"), (model.final_norm, "head_loss")):
            hook = module.register_forward_pre_hook(lambda *_, part=part: _begin(parts, part))
            stack.callback(hook.remove)
        parts.switch("rest")
        parts.seconds = dict.fromkeys(PARTS, 0.0)
        yield parts
        parts.switch("rest")


def is_compiled(model: Denoiser) -> bool:
    """Whether training runs the blocks as compiled graphs."""
    return model.training_calls is not denoiser.EAGER


BACKEND_OF = {"BlockMask": "flex", "Packed": "varlen", "Ranges": "loop", "Tensor": "sdpa"}
"""By the type of `Segments.mask`; None is a batch of whole rows, for which no mask is made."""


def backend_of(segments: Segments) -> str:
    return BACKEND_OF.get(type(segments.mask).__name__, "whole rows")


def _counted(plan: Callable[..., Any], backends: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        segments = plan(*args, **kwargs)
        backends[backend_of(segments)] += 1
        return segments

    return counted


def _begin(parts: PartClock, part: str) -> None:
    parts.switch(part)


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Generator[None]:
    """`owner.name` wrapped for a while; what its class gave leaves no trace on the object."""
    missing = object()
    own = vars(owner).get(name, missing)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
