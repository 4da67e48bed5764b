"""A GPU that is not there: tensors that say they lie on `cuda:0` and are computed on the CPU.

With it the code that runs on a GPU alone runs here, as far as Python goes: the branches it takes,
which tensors lie where, what is asked of the device. An operator that is given tensors of both
places raises, as CUDA does. What the host would have to wait for is counted in `Gpu.waits`. No
kernel of a GPU is run, none is compiled, and autocast is the CPU's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
NAMES = {(7, 5): "Tesla T4", (8, 0): "NVIDIA A100-SXM4-40GB"}
ASK = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount"}
INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Gpu(TorchDispatchMode):
    """While active, what is made on or moved to `GPU` lies there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.pinned: set[int] = set()
        """ids of tensors from which a GPU may read by itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if isinstance(x, OnGpu)]
        if not there and (kwargs.get("device") or torch.device("cpu")).type != "cuda":
            return func(*args, **kwargs)
        if name == "copy_" and len(there) == 1 and tensors[1].ndim:
            self.waits[name] += 1
            func(*map(_held, args))
            return args[0]
        self._look_at(name, args, [x for x in tensors if not isinstance(x, OnGpu) and x.ndim])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if name == "_local_scalar_dense":
            return out
        return return_and_correct_aliasing(func, args, kwargs, tree_map(_on_gpu, out))

    def _look_at(self, name: str, args: tuple[Any, ...], here: list[Tensor]) -> None:
        """Counts what has to wait; raises for tensors of both places."""
        if name in ASK:
            self.waits[name] += 1
        if name in INDEX:
            for index in args[1]:
                if index is not None and (
                    index.dtype == torch.bool or not isinstance(index, OnGpu)
                ):
                    self.waits[name] += 1
        elif here:
            raise RuntimeError(f"{name}: tensors on cpu and cuda, {[x.shape for x in here]} on cpu")


class _Methods(TorchFunctionMode):
    """Methods that change a tensor's place: autograd knows of one place alone."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.cpu:
            return self._to(args[0], "cpu")
        if func is Tensor.pin_memory:
            self.gpu.pinned.add(id(args[0]))
            return args[0]
        if func is Tensor.tolist and isinstance(args[0], OnGpu):
            self.gpu.waits["tolist"] += 1
            return _held(args[0]).tolist()
        if func is Tensor.numpy and isinstance(args[0], OnGpu):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return func(*args, **kwargs)

    def _to(self, tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        rest: list[Any] = []
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for arg in args:
            if isinstance(arg, (str, torch.device)):
                device = torch.device(arg)
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, bool) and not rest:
                non_blocking = arg
        was_pinned = id(tensor) in self.gpu.pinned
        if device is not None and (torch.device(device).type == "cuda") != isinstance(
            tensor, OnGpu
        ):
            if not (non_blocking and was_pinned):
                self.gpu.waits[f"to {torch.device(device).type}"] += 1
            tensor = (_Down if isinstance(tensor, OnGpu) else _Up).apply(tensor)
        if dtype is None:
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.to(tensor, dtype, **kwargs)


class OnGpu(Tensor):
    """`held`, a tensor on the CPU, that says it is on the GPU."""

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="cpu",
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        raise AssertionError(f"{func} outside of `stand_in_gpu`")


class Event:
    """A millisecond passes from each to the next."""

    count = 0

    def __init__(self, *, enable_timing: bool) -> None:
        Event.count += 1
        self.at = Event.count

    def record(self, stream: object) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return OnGpu(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _held(grads[0])


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _held(tensor).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return OnGpu(grads[0])


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def _on_gpu(value: Any) -> Any:
    return OnGpu(value) if isinstance(value, Tensor) and not isinstance(value, OnGpu) else value


@contextlib.contextmanager
def stand_in_gpu(capability: tuple[int, int]) -> Iterator[Gpu]:
    """A T4 (7, 5) or an A100 (8, 0) is here, called `cuda:0`: `cuda` alone is refused by torch."""
    gpu = Gpu()
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _replacements(gpu, capability):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        # A module that is moved gets new parameters: the old ones cannot hold our tensors.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        stack.enter_context(gpu)
        stack.enter_context(_Methods(gpu))
        yield gpu


def _replacements(gpu: Gpu, capability: tuple[int, int]) -> list[tuple[Any, str, Any]]:
    """(owner, name, what stands there instead)."""
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled
    dtype, grouped = torch.get_autocast_dtype, clip_grad._group_tensors_by_device_and_dtype

    class CpuAutocast(autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu", *args, **kwargs)

    def by_place(tensors: Any) -> Any:
        groups = grouped(tensors).items()
        return {(lists[0][0][0].device, dtype): lists for (_, dtype), lists in groups}

    def synchronize(device: object = None) -> None:
        gpu.waits["synchronize"] += 1

    return [
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.cuda, "get_device_name", lambda device=None: NAMES[capability]),
        (torch.cuda, "synchronize", synchronize),
        (torch.cuda, "current_stream", lambda device=None: None),
        (torch.cuda, "Event", Event),
        (torch, "autocast", CpuAutocast),
        (torch.amp, "autocast", CpuAutocast),
        (torch, "is_autocast_enabled", lambda device_type: is_enabled("cpu")),
        (torch, "get_autocast_dtype", lambda device_type: dtype("cpu")),
        # Inference tensors have no version, which a tensor of ours needs.
        (torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode)),
        (clip_grad, "_group_tensors_by_device_and_dtype", by_place),
    ]
