"""How many rows go through the model at once: chosen for the memory there is.

The choice changes memory and speed, and the result by rounding alone: the masks of a step, and what
each counts, are drawn before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from diffurefill.config import RunConfig, UserError, load_preset
from diffurefill.runtime import available_bytes
from diffurefill.train.memory import Footprint, arithmetic_on, largest_masked_share, predict

log = logging.getLogger(__name__)

MOST_TOKENS = {"cuda": 32_768, "cpu": 8_192}
"""Of a micro-batch: products are as fast as they get, and more rows only take memory."""
USABLE = {"cuda": 0.9, "cpu": 0.5}
"""Share of the free memory: a GPU's allocator leaves gaps; other processes live beside a CPU's."""
SHORTER_ROWS = (1024, 512, 256, 128)
SMALLER_PRESETS = ("stand-38m", "stand-micro")
MIB, GIB = 2**20, 2**30


class MicroBatch:
    """`rows` at once; halved a single time where a GPU has less memory than was thought."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._is_halved = False

    def halve(self) -> None:
        """Raises UserError when that was done before, or there is but one row."""
        if self.rows == 1:
            raise UserError(
                "the GPU's memory is too small for one row at a time: set data.row_length or "
                "train.activation_budget lower, or take a smaller model"
            )
        if self._is_halved:
            raise UserError(
                f"the GPU's memory is too small for {self.rows} rows at once: set "
                "train.micro_batch_rows lower, or train.activation_budget below 1"
            )
        self._is_halved, self.rows = True, (self.rows + 1) // 2
        log.warning("out of GPU memory: from here on %d rows at once", self.rows)


def micro_batch(config: RunConfig, device: torch.device, before: int | None = None) -> MicroBatch:
    """The one that the configuration asks for, a whole batch at most, or the largest that fits.
    before: rows that a resumed run had at once; they stay where they fit, so that sums round alike.

    Raises UserError, which says what would fit, where not even one row does.
    """
    asked = config.train.micro_batch_rows
    if asked:
        return MicroBatch(min(asked, config.train.batch_rows))
    return MicroBatch(fitting_rows(config, device.type, available_bytes(device), before))


def sizes(config: RunConfig, device_type: str) -> list[int]:
    """Divisors of the batch, so that all micro-batches have one shape; ascending, 1 at least."""
    most = max(1, MOST_TOKENS[device_type] // config.data.row_length)
    batch_rows = config.train.batch_rows
    return [n for n in range(1, min(most, batch_rows) + 1) if batch_rows % n == 0]


def fitting_rows(
    config: RunConfig, device_type: str, free_bytes: int, before: int | None = None
) -> int:
    """`before` where that fits, else the largest of `sizes` that does; UserError: not even one."""
    usable = USABLE[device_type] * free_bytes
    for rows in filter(None, (before, *reversed(sizes(config, device_type)))):
        if footprint(config, device_type, rows).total <= usable:
            return rows
    need = footprint(config, device_type, 1).total
    ways = "; ".join(_what_fits(config, device_type, usable))
    raise UserError(
        f"one row of {config.data.row_length} tokens needs {in_words(need)} and "
        f"{device_type} has {in_words(usable)} to give; "
        + (f"what would fit: {ways}" if ways else "nothing here would fit: take a larger machine")
    )


def unit_of(most: float) -> tuple[str, int]:
    """(name, bytes) of the unit for sizes of which `most` bytes is the largest."""
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB)


def in_words(num_bytes: float) -> str:
    unit, size = unit_of(num_bytes)
    return f"{num_bytes / size:.2f} {unit}"


@functools.lru_cache(maxsize=32)
def footprint(config: RunConfig, device_type: str, rows: int) -> Footprint:
    """Of the fullest micro-batch that a run meets."""
    share = largest_masked_share(config.objective, rows, causal=config.model.causal)
    return predict(config, arithmetic_on(device_type, config), rows, share)


def _what_fits(config: RunConfig, device_type: str, usable: float) -> Iterator[str]:
    """Changes of the configuration, each by itself."""
    for budget in (0.5, 0.01):
        train = replace(config.train, activation_budget=budget)
        if footprint(replace(config, train=train), device_type, 1).total <= usable:
            yield f"train.activation_budget = {budget}"
            break
    for length in SHORTER_ROWS:
        if length >= config.data.row_length or length % config.data.short_length:
            continue
        data = replace(config.data, row_length=length)
        if footprint(replace(config, data=data), device_type, 1).total <= usable:
            yield f"data.row_length = {length}"
            break
    for name in SMALLER_PRESETS:
        preset = load_preset(name)
        if preset.model.width < config.model.width and (
            footprint(preset, device_type, 1).total <= usable
        ):
            yield f"--preset {name}"
            break
