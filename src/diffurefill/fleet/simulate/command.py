"""`diffurefill simulate`: what a fleet would achieve, before a machine is rented for it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffurefill.config import FleetConfig, UserError
from diffurefill.config.fleet import Codec, Downlink

if TYPE_CHECKING:
    from diffurefill.fleet.simulate.capacity import Setting

SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
BYTES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9}
NUMBER = r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)"


def duration(text: str, option: str) -> float:
    """Seconds in `2h`, `90s`, `10min`, `1.5d`; `never` is for ever."""
    if text.strip().lower() == "never":
        return math.inf
    return _quantity(text, option, SECONDS, "such as 90s, 10min, 2h or never")


def bandwidth(text: str, option: str) -> float:
    """Bytes a second in `100MB/s`, `1GB/s`."""
    bare = re.sub(r"/s$", "", text.strip())
    if bare.lower().endswith("bit"):
        raise UserError(f"{option} {text!r}: give bytes, such as 100MB/s, not bits")
    return _quantity(bare, option, BYTES, "such as 100MB/s or 1GB/s")


def number(text: str, option: str) -> float:
    """`1.08e9`, `1.08B`, `38M`."""
    return _quantity(text, option, {"": 1.0, "M": 1e6, "B": 1e9}, "such as 1.08e9 or 1.08B")


def _quantity(text: str, option: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(NUMBER, text)
    try:
        value = float(found.group(1)) * units[found.group(2)] if found else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if value <= 0 or not math.isfinite(value):
        raise UserError(f"{option} {text!r} is not understood: {example}")
    return value


@dataclass
class Simulate:
    """What a fleet would achieve, in virtual time: rounds, waiting, tokens, bytes, commits."""

    workers: int = 4
    """Workers that train at the same time."""
    lifetime: str = "never"
    """Mean life of a worker, such as 2h; `never`: nobody dies. The report's was about 3.7h."""
    bandwidth: str = "100MB/s"
    """Of each worker, both ways."""
    merger_bandwidth: str = "1GB/s"
    """Of the merger's machine, both ways."""
    params: str = "1.08e9"
    """Parameters of the model."""
    codec: Codec = "fp32-delta"
    """How contributions travel."""
    downlink: Downlink = "full"
    """How new globals travel; `update`: as an int8 step, the whole file later."""
    local_steps: int = 150
    """fleet.local_steps"""
    tokens_per_step: int = 131_072
    """Tokens of an optimiser step."""
    tokens_per_second: float = 46_600.0
    """Of a worker while it trains."""
    latency: str = "0.2s"
    """Of one call to the hub."""
    relaunch: str = "10min"
    """From a worker's death to its successor's start."""
    poll: str = f"{FleetConfig().poll_seconds:g}s"
    """fleet.poll_seconds"""
    grace: str = "150s"
    """fleet.grace_seconds"""
    hours: float | None = None
    """Virtual hours to count; by default as many as need a few seconds each."""
    seed: int = 0
    """Of lives and jitter: the same seed tells the same hours."""
    json: bool = False
    """Print every figure as JSON."""
    replay: int | None = None
    """Instead of all that: tell everything that happens in this seed of `make chaos`."""
    profile: str | None = None
    """With --replay: the kind of faults, where the seed was not run with its own."""

    def run(self) -> int:
        # Not before somebody simulates: the command table is read for every command's help.
        from diffurefill.fleet.simulate import campaign, report

        if self.replay is not None:
            return 1 if campaign.replay(self.replay, self.profile) else 0
        setting = self.setting()
        rows = report.run(setting, self.hours, _progress)
        _progress("")
        if self.json:
            print(json.dumps([row.json() for row in rows]))
        else:
            print("\n".join(report.page(setting, rows)), flush=True)
        return 0

    def setting(self) -> Setting:
        """Raises UserError that names the option that makes no sense."""
        from diffurefill.fleet.simulate.capacity import Setting

        at_least_one: tuple[tuple[str, float], ...] = (
            ("workers", self.workers),
            ("local-steps", self.local_steps),
            ("tokens-per-step", self.tokens_per_step),
            ("tokens-per-second", self.tokens_per_second),
        )
        for name, value in at_least_one:
            if not 1 <= value < math.inf:
                raise UserError(f"--{name} {value}: must be at least 1")
        if self.hours is not None and not 0.5 <= self.hours <= 1000:
            raise UserError(f"--hours {self.hours}: from 0.5 to 1000, or leave it out")
        rate = _option(bandwidth, "--bandwidth", self.bandwidth)
        return Setting(
            workers=self.workers,
            params=_option(number, "--params", self.params),
            local_steps=self.local_steps,
            tokens_per_step=self.tokens_per_step,
            tokens_per_second=self.tokens_per_second,
            upload_bytes_per_second=rate,
            download_bytes_per_second=rate,
            merger_bytes_per_second=_option(bandwidth, "--merger-bandwidth", self.merger_bandwidth),
            latency_seconds=_option(duration, "--latency", self.latency),
            lifetime_seconds=_option(duration, "--lifetime", self.lifetime),
            relaunch_seconds=_option(duration, "--relaunch", self.relaunch),
            codec=self.codec,
            downlink=self.downlink,
            poll_seconds=_option(duration, "--poll", self.poll),
            grace_seconds=_option(duration, "--grace", self.grace),
            seed=self.seed,
        )


def _option(parse: Callable[[str, str], float], name: str, text: str) -> float:
    return parse(text, name)


def _progress(line: str) -> None:
    """A line on stderr, rewritten in place on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
