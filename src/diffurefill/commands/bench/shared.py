"""What the bench commands share: their options, a trainer on real rows, timing by turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from diffurefill.commands.common import progress, resolved, say
from diffurefill.config import RunConfig, UserError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from diffurefill.data.documents import Corpus
    from diffurefill.data.loader import Loader
    from diffurefill.data.packing import Rows
    from diffurefill.data.tokens.tokenizer import Tokenizer
    from diffurefill.train.loop import Trainer

Call = Callable[[], object]


@dataclass(kw_only=True)
class Bench:
    """The options of every bench."""

    preset: str = "demo"
    """The starting configuration; see also --config."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Paths of the only source: short for a [[data.sources]] section."""
    device: str | None = None
    """cpu, cuda, cuda:1 ...; the one that training takes by default."""
    threads: int | None = None
    """Limit on CPU threads; all cores by default."""
    json: bool = False
    """Print one JSON object instead of the table."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.runtime import require_device, set_threads

        set_threads(self.threads)
        device = require_device(self.device)
        config = resolved(self.settings, self.data, quietly=True)
        figures = self.measure(with_rows_that_fit(config, device), device)
        progress("")
        figures = {"preset": self.preset, **figures}
        if self.json:
            say(json.dumps(figures))
            return 0
        from rich.console import Console

        Console().print(self.table(figures))
        return 0

    def measure(self, config: RunConfig, device: torch.device) -> dict[str, Any]:
        raise NotImplementedError

    def table(self, figures: dict[str, Any]) -> Table:
        raise NotImplementedError


def with_rows_that_fit(config: RunConfig, device: torch.device) -> RunConfig:
    """`config` with its automatic number of rows at once made a number."""
    from diffurefill.train.micro_batch import micro_batch

    rows = micro_batch(config, device).rows
    return replace(config, train=replace(config.train, micro_batch_rows=rows))


def open_trainer(config: RunConfig, device: torch.device) -> tuple[Trainer, Corpus]:
    """A trainer at step 0 with the run's first weights, and its text."""
    from diffurefill.data.documents import open_corpus
    from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer

    progress("opening the text")
    corpus = open_corpus(config.data)
    tokenizer = make_tokenizer(config, corpus)
    steps = config.fleet.local_steps
    trainer = Trainer(
        config, corpus, tokenizer, slot=0, interval_steps=steps, device=device, report=progress
    )
    # Not zeros: a card that multiplies zeros draws less power and clocks higher.
    trainer.load_weights(initial_weights(config), step=0)
    trainer.seek(None)
    return trainer, corpus


def first_rows(config: RunConfig) -> Rows:
    """The rows of a run's first step."""
    from diffurefill.data.documents import open_corpus
    from diffurefill.train.loop import make_tokenizer

    progress("opening the text")
    corpus = open_corpus(config.data)
    with open_loader(config, corpus, make_tokenizer(config, corpus)) as loader:
        return next(loader)


def open_loader(config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> Loader:
    """A run's rows from the first on, made where they are asked for."""
    from diffurefill.data.loader import Loader

    return Loader(
        corpus,
        tokenizer,
        data=config.data,
        seed=config.seed,
        slot=0,
        interval_rows=config.fleet.local_steps * config.train.batch_rows,
        batch_rows=config.train.batch_rows,
        prefetch=0,
    )


def require_repeats(repeats: int) -> None:
    if repeats < 1:
        raise UserError("--repeats must be at least 1")


def by_turns(
    calls: Mapping[str, Call],
    device: torch.device,
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Median seconds of each call over `repeats` rounds, after one that does not count.

    Of CPU time on a CPU, as others may be using it too, summed over the threads; of wall time on a
    GPU, waited for. `before` comes before every call and is not timed.
    """
    from diffurefill.runtime import wait_for

    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            progress(f"{name}, {round_}/{repeats}")
            before()
            wait_for(device)
            began = clock()
            call()
            wait_for(device)
            seconds[name].append(clock() - began)
    return {name: median(taken[1:]) for name, taken in seconds.items()}
