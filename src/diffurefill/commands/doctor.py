"""`diffurefill doctor`: what this machine offers, if a store is safe, where memory would go."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from diffurefill.commands.common import progress, say
from diffurefill.config import RunConfig, UserError, load_preset
from diffurefill.store.base import open_store

if TYPE_CHECKING:
    from diffurefill.train.memory import Footprint


@dataclass
class Doctor:
    """What this machine offers, whether a store on it is safe to use, and what would fit on it."""

    store: Positional[str | None] = None
    """A store to test: writes a little, on a lane of its own, and removes it. A folder or bucket
    need not hold a run yet; a repository hf://user/repo has to be there."""
    preset: str | None = None
    """Show where the memory of a training step goes, and how many rows at once fit."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    device: Literal["cpu", "cuda"] | None = None
    """The device to train on; it need not be here."""
    memory_gib: float | None = None
    """Memory of a device that is not here; what is free by default."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.runtime import doctor

        asks_for_memory = self.preset or self.config or self.settings != load_preset("demo")
        if (self.device or self.memory_gib is not None) and not asks_for_memory:
            raise UserError("say which model is to fit: --preset base-1b, for example")
        if self.memory_gib is not None and not 0 < self.memory_gib < float("inf"):
            raise UserError("--memory-gib must be above 0: what the device has, in GiB")
        for name, value in doctor().items():
            say(f"{name:<12} {value}")
        say(f"{'products':<12} {_products()}")
        say(f"{'compiled':<12} {_compiled_code()}")
        if self.store is not None:
            _test_store(self.store)
            say(f"{'store':<12} {self.store}: conditional writes are honoured")
        if asks_for_memory:
            return self._show_memory()
        return 0

    def _show_memory(self) -> int:
        from diffurefill.runtime import available_bytes, default_device
        from diffurefill.train.memory import arithmetic_on
        from diffurefill.train.micro_batch import (
            GIB,
            USABLE,
            fitting_rows,
            footprint,
            in_words,
            sizes,
        )

        here = default_device()
        device_type = self.device or here.type
        if self.memory_gib is None and device_type != here.type:
            raise UserError(f"no {device_type} here to ask: give its --memory-gib")
        free = available_bytes(here) if self.memory_gib is None else int(self.memory_gib * GIB)
        settings, usable = self.settings, USABLE[device_type] * free
        dtype = arithmetic_on(device_type, settings).dtype
        found = []
        for rows in sizes(settings, device_type):
            progress(f"counting {rows} rows at once")
            found.append(footprint(settings, device_type, rows))
        progress("")
        say(
            f"\none step on {device_type}, {'16-bit' if dtype else 'fp32'} products, "
            f"{settings.optim.optimizer}, rows of {settings.data.row_length}, activation budget "
            f"{settings.train.activation_budget:g}; {_unit(found)[0]} when it holds most"
        )
        for line in table(found, usable):
            say(line)
        rows = fitting_rows(settings, device_type, free)
        say(
            f"{in_words(usable)} may be used ({USABLE[device_type]:.0%} of what is free): "
            f"train.micro_batch_rows = 0 takes {rows} rows at once"
        )
        return 0


def _test_store(uri: str) -> None:
    """Raises what `Store.selftest` does. Where a folder holds no run, or is not even there yet, a
    temporary one in it, or in the nearest above it that is there, is tested in its place."""
    import tempfile

    from diffurefill.store.durable import disk_errors, make_folder

    folder = Path(uri.removeprefix("file://")).absolute()
    is_folder = "://" not in uri or uri.startswith("file://")
    if not is_folder or (folder / "lanes").is_dir():
        open_store(uri).selftest()
        return
    there = next(place for place in (folder, *folder.parents) if place.exists())
    make_folder(there)  # refuses a file
    with (
        disk_errors(there),
        tempfile.TemporaryDirectory(prefix=".doctor-", dir=there) as scratch,
    ):
        open_store(scratch, create=True).selftest()


def _products() -> str:
    """How fast matrices are multiplied here, and how to write where a CPU is faster in half."""
    import torch

    from diffurefill.runtime import default_device, training_dtype
    from diffurefill.train.speed import peak_of

    device = default_device()
    half = peak_of(device, training_dtype(device, "auto") or torch.bfloat16)
    if device.type == "cuda":
        return half.what
    plain = peak_of(device, torch.float32)
    pays = "; generate writes sooner with --dtype bfloat16"
    return f"{plain.what}; {half.what}{pays if half.flops > 1.5 * plain.flops else ''}"


def _compiled_code() -> str:
    from diffurefill.model.compiling import code_folder

    folder, size = code_folder(), 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # of a run that is compiling
            size += path.lstat().st_size if path.is_file() else 0
    return f"{size / 1e6:.1f} MB of code in {folder}, which may be deleted"


def table(found: list[Footprint], usable: float) -> list[str]:
    """A line for every number of rows, a column for everything that takes memory."""
    kinds, (_, size) = list(found[0].bytes_by_kind), _unit(found)
    lines = ["rows  " + "  ".join([*kinds, "  total", "fits"])]
    for f in found:
        cells = [f"{f.bytes_by_kind[kind] / size:{len(kind)}.2f}" for kind in kinds]
        fits = "yes" if f.total <= usable else "no"
        lines.append(f"{f.rows:4}  " + "  ".join([*cells, f"{f.total / size:7.2f}", fits]))
    return lines


def _unit(found: list[Footprint]) -> tuple[str, int]:
    from diffurefill.train.micro_batch import unit_of

    return unit_of(max(f.total for f in found))
