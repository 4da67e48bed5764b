"""Bytes that tensors hold: counted while a program runs on tensors without data, or measured.

The count sees every storage that an operator returns; what an operator uses inside itself, and the
allocator's rounding, it does not see.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WORKING = "working"
"""The kind of a storage that nobody has named."""


class LiveBytes(TorchDispatchMode):
    """While active: bytes of the live storages by kind, and how they were when they were most.

    `kind_of(func, args, out)` names what an operator returns; `name` changes it afterwards.
    """

    def __init__(self, kind_of: Callable[[Any, tuple[Any, ...], Tensor], str]) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._kind_of = kind_of
        self._kinds: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _key(leaf) not in self._kinds:
                self._add(leaf, self._kind_of(func, args, leaf))
        return out

    def kind(self, tensor: Tensor) -> str | None:
        return self._kinds.get(_key(tensor))

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        for tensor in tensors:
            key = _key(tensor)
            if key in self._kinds:
                size = tensor.untyped_storage().nbytes()
                self.live[self._kinds[key]] -= size
                self._kinds[key] = kind
                self.live[kind] += size

    def forget_peak(self) -> None:
        """From here on the most is sought anew."""
        self.peak = self.live.copy()

    def _add(self, tensor: Tensor, kind: str) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        self._kinds[key] = kind
        self.live[kind] += storage.nbytes()
        weakref.finalize(storage, self._drop, key, storage.nbytes())
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _drop(self, key: int, size: int) -> None:
        self.live[self._kinds.pop(key)] -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def measured_peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` held at most beyond what there was before, by the allocator's own count.

    On CUDA an allocation is rounded up to 512 bytes, and what lies free in a block is not counted.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = most = 0
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results
    for event in events.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most
