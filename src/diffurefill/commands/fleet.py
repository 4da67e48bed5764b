"""Commands on a run: make it, work for it, look at it, mend it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from diffurefill.commands.common import progress, require_access, resolved, say
from diffurefill.config import RunConfig
from diffurefill.store.base import open_store


@dataclass
class Init:
    """Make a new run: train the tokenizer, set probes aside, publish generation 0."""

    store: Positional[str]
    """A folder (./run), hf://user/repo, hf://buckets/..., s3://..., gs://... or az://..."""
    preset: str = "demo"
    """The starting configuration; see also --config."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Paths of the only source: short for a [[data.sources]] section, whose text field is
    --data.sources.0.text-column."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.copies import local_copies
        from diffurefill.fleet.create import create_run

        config = resolved(self.settings, self.data)
        with local_copies() as work:
            create_run(self.store, config, work, say)
        store = shlex.quote(self.store)
        say(f"next: diffurefill merger {store}  and  diffurefill worker {store}")
        return 0


@dataclass
class Worker:
    """Train for a run: adopt the global, take local steps, push, wait. May be killed any time."""

    store: Positional[str]
    """The run's address: ./run, hf://user/repo, s3://bucket/run ..."""
    worker: int | None = None
    """Number and data slot; the first one nobody holds by default. Never the same twice."""
    rounds: int | None = None
    """Stop after so many merged contributions."""
    minutes: float | None = None
    """How long this session lasts: what is trained by then is pushed before its end."""
    threads: int | None = None
    """Limit on CPU threads; one each for two workers on two cores."""
    device: str | None = None
    """cpu, cuda, cuda:1 ...; a GPU by default where there is one."""

    def run(self) -> int:
        require_access(self.store)
        from diffurefill.fleet.start import start_worker

        start_worker(
            self.store, self.worker, self.rounds, self.minutes, self.threads, say, self.device
        )
        return 0


@dataclass
class Merger:
    """Average what the workers push into the next global. May be killed at any time."""

    store: Positional[str]
    """The run's address: ./run, hf://user/repo, s3://bucket/run ..."""
    generations: int | None = None
    """Stop when so many generations exist."""
    guard: bool = True
    """Score every new global on held-out text before it is published; needs memory for a model."""
    threads: int | None = 1
    """Limit on CPU threads."""

    def run(self) -> int:
        require_access(self.store)
        from diffurefill.fleet.start import start_merger

        start_merger(self.store, self.generations, self.threads, self.guard, say)
        return 0


@dataclass
class Status:
    """The fleet, as the logs that workers push tell it."""

    store: Positional[str]
    """The run's address: ./run, hf://user/repo, s3://bucket/run ..."""

    def run(self) -> int:
        from rich.console import Console

        from diffurefill.fleet.status import status_tables

        for table in status_tables(open_store(self.store)):
            Console().print(table)
        return 0


@dataclass
class Rollback:
    """Publish an earlier generation again, as a new one. A merger at work goes on from it."""

    store: Positional[str]
    """The run's address: ./run, hf://user/repo, s3://bucket/run ..."""
    to: int | None = None
    """The generation to return to; the one before the newest by default."""

    def run(self) -> int:
        from diffurefill.fleet.manage import rollback

        rollback(self.store, self.to, say)
        return 0


@dataclass
class Compact:
    """Give back the room of old globals and payloads; what they held can be audited no more."""

    store: Positional[str]
    """The run's address: ./run, hf://user/repo, s3://bucket/run ..."""

    def run(self) -> int:
        from diffurefill.fleet.manage import compact

        compact(self.store, say)
        return 0


@dataclass
class Audit:
    """Re-derive a run's history from its store and check it against the protocol's invariants."""

    store: Positional[str]
    """The run's address: ./run, hf://user/repo, s3://bucket/run ..."""

    def run(self) -> int:
        from diffurefill.copies import local_copies
        from diffurefill.fleet.audit import audit_run
        from diffurefill.fleet.run import config_at
        from diffurefill.fleet.start import averager_of

        store = open_store(self.store)
        with local_copies() as work:
            audit = audit_run(store, averager_of(config_at(store).fleet), work, progress)
        for line in (*audit.lines(), *audit.violations):
            say(line)
        say(
            f"audit: {audit.generations} generations, {audit.versions} versions, "
            f"{sum(audit.checks.values())} checks, {len(audit.violations)} violations"
        )
        return 1 if audit.violations else 0
