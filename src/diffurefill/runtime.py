"""Device, threads and keyed randomness: what every room shares about the machine.

Torch is imported inside functions, so that data and store code can use the rest without it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from diffurefill.copies import copies_place
from diffurefill.toml import UserError

if TYPE_CHECKING:
    import torch


def philox(*key: int | str) -> np.random.Generator:
    """A generator that depends on `key` alone: no global state, no order of calls, no worker count.

    Philox is counter-based; the key's parts are hashed to its 128-bit key. Example:
    `philox(run_seed, "mask", gen, slot, step, row)`.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def default_device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require_device(name: str | None) -> torch.device:
    """The device called `name`, or the default one; UserError where it is not to be had here."""
    import torch

    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"no device {name!r}: say cpu, cuda or cuda:0") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UserError(f"training runs on cpu and cuda, not on {name!r}")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= found:
        raise UserError(f"no device {name!r} here: torch finds {found} CUDA devices, say cpu")
    return device


def device_name(device: torch.device) -> str:
    """`cpu`, or what the GPU calls itself."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def set_threads(num_threads: int | None, *, keeps_memory: bool = True) -> int:
    """Limit torch to `num_threads` (None: leave it as it is); returns the number in force.

    Two processes on two cores want one thread each: spinning at every parallel region costs more
    than the second thread brings. What begins to compute begins here, so memory is seen to as well;
    a merger, whose promise is to need little, does not keep what it frees. UserError below 1.
    """
    import torch

    if num_threads is not None and num_threads < 1:
        raise UserError("--threads must be at least 1")
    if keeps_memory:
        _keep_freed_memory()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


@functools.cache
def _keep_freed_memory() -> None:
    """Tell glibc not to give the system back what is freed: every step and pass asks for the same
    sizes again, and the system clears each page that it hands out (bench/allocator.py).

    Larger tensors than a limit still come from the system: 1 GB, or the 32 MB that versions before
    2.35 take at most.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3  # of malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    if not mallopt(mmap_threshold, 1 << 30):
        mallopt(mmap_threshold, 32 << 20)


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 by instructions of its own: AVX-512 BF16, which those with
    AMX have, too. Products were 2 and 8 times as fast as in fp32 on the two we met."""
    return "avx512_bf16" in (_text("/proc/cpuinfo") or "").split()


@functools.cache
def cpu_has_amx() -> bool:
    """Whether this CPU has matrix units for bf16."""
    return "amx_bf16" in (_text("/proc/cpuinfo") or "").split()


def cpu_instructions() -> str:
    """What this CPU multiplies with, which speeds hang on: AVX2, AVX512, AVX512 BF16 AMX ..."""
    import torch

    units = {"BF16": cpu_has_bf16(), "AMX": cpu_has_amx()}
    return " ".join([torch.backends.cpu.get_cpu_capability(), *filter(units.get, units)])


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware there multiplies bf16, rather than emulating it."""
    import torch

    if device.type != "cuda":
        return cpu_has_bf16()
    if not torch.cuda.is_available():
        return False
    # torch.cuda.is_bf16_supported asks of the current GPU, which may be another one.
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def training_dtype(
    device: torch.device, precision: Literal["auto", "fp32", "bf16", "fp16"]
) -> torch.dtype | None:
    """The dtype to autocast to in training, None for fp32. float16 wants its loss scaled.

    Raises UserError for a precision that the device does not have.
    """
    import torch

    on_cuda, native = device.type == "cuda", has_bf16(device)
    if precision == "auto":
        return torch.bfloat16 if native else torch.float16 if on_cuda else None
    if precision == "fp32":
        return None
    if precision == "fp16" and not on_cuda:
        raise UserError("train.precision fp16 is for GPUs without bf16: set auto, fp32 or bf16")
    if precision == "bf16" and on_cuda and not native:
        raise UserError(
            "this GPU has no bf16 and would only emulate it: set train.precision to auto or fp16"
        )
    return torch.float16 if precision == "fp16" else torch.bfloat16


def measuring_dtype(device: torch.device) -> torch.dtype | None:
    """What to autocast to where likelihoods are measured: bfloat16 on a GPU that has it, else None,
    fp32. On a CPU results then do not depend on how requests were batched."""
    import torch

    return torch.bfloat16 if device.type == "cuda" and has_bf16(device) else None


def writing_dtype(
    device: torch.device, wanted: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
) -> torch.dtype:
    """The dtype of the weights of a model that writes. auto: float32 on a CPU, where a row is then
    the same alone and in any batch; on a GPU bfloat16 where it has it, else float16."""
    import torch

    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if has_bf16(device) else torch.float16


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given; a CPU always has."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. A GPU is not waited for, which it may be from pageable memory."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def not_finite(who: str, dtype: torch.dtype | None) -> UserError:
    """For a model whose logits are not finite when it computes in `dtype` (None: float32)."""
    name = str(dtype or "float32").removeprefix("torch.")
    way_out = "" if name == "float32" else "--dtype float32 (in Python, dtype=None to load) or "
    return UserError(f"{who} gave logits that are not finite in {name}: use {way_out}other weights")


def available_bytes(device: torch.device) -> int:
    """Memory that this process can still have there, with what torch already holds of a GPU.

    On a CPU the smaller of what the system has and what a container allows.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return int(min(_system_bytes(), _container_bytes()))


def _system_bytes() -> int:
    lines = (_text("/proc/meminfo") or "").splitlines()
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_bytes() -> float:
    """Left below the limit of a version 2 control group; file caches do not count against it."""
    limit = (_text("/sys/fs/cgroup/memory.max") or "max").strip()
    if limit == "max":
        return float("inf")
    facts = dict(line.split() for line in (_text("/sys/fs/cgroup/memory.stat") or "").splitlines())
    return max(0, int(limit) - int(facts.get("anon", 0)))


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as f:
            return f.read()
    except OSError:
        return None


def machine_facts() -> dict[str, Any]:
    """What a result file says of the machine: no names, no paths, no environment."""
    import torch

    device = default_device()
    return {
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "instructions": cpu_instructions(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(device),
    }


def without_folders(word: str) -> str:
    """A path's last part, behind its prefix: result files name no machine's folders."""
    prefix, colon, rest = word.rpartition(":")
    if rest.startswith(("/", "./", "../", "~")):
        rest = rest.rstrip("/").rpartition("/")[2]
    return f"{prefix}{colon}{rest}"


def require_writable(path: Path) -> None:
    """UserError now, before long work, where the file `path` could not be written after it."""
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder: give the name of a file in it")
    if not os.path.isdir(path.parent):
        raise UserError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    real = os.path.realpath(path)  # of a link the file it names: a trial must leave the link alone
    is_new = not os.path.exists(real)
    try:
        open(real, "ab").close()
        if is_new:
            os.unlink(real)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file") from None


def provenance(command: str) -> dict[str, Any]:
    """What a result file says of how to make it again: command, version, commit, machine. Of the
    command's paths the last part alone: it may be read by everyone."""
    from diffurefill import __version__

    changes = _git("status", "--porcelain", "-uno", "--", "src", "bench")
    return {
        "command": " ".join(map(without_folders, command.split(" "))),
        "package_version": __version__,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(changes),
        "machine": machine_facts(),
    }


def _git(*arguments: str) -> str | None:
    """Output of git in the package's checkout; None for an installed package or without git."""
    import subprocess
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def doctor() -> dict[str, str]:
    """What this machine offers to a worker, one line each, for `diffurefill doctor`."""
    facts, device, place = machine_facts(), default_device(), copies_place()
    dtype = training_dtype(device, "auto")
    free = shutil.disk_usage(place).free / 1e9
    found = {name: str(value) for name, value in facts.items()}
    found["precision"] = "float32" if dtype is None else f"{dtype} autocast over float32 weights"
    found["temporary"] = f"{free:.1f} GB free in {place}"
    found["memory"] = f"{available_bytes(device) / 2**30:.1f} GiB free on {device.type}"
    return found
