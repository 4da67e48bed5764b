"""`diffurefill COMMAND`: one class per command, each importing what it needs only when run.

Exit codes: 0 done, 1 a check failed or the store could not be used, 2 a mistake in what was asked
for (one line says what to do), 130 interrupted.
"""

from __future__ import annotations

import errno
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from diffurefill.config import (
    RunConfig,
    UserError,
    dumps,
    load_file,
    load_preset,
    preset_names,
    with_sources,
)
from diffurefill.fleet.simulate.command import Simulate
from diffurefill.store.base import Denied, StoreError, open_store

Weights = Literal["ema", "global"]


@dataclass
class Demo:
    """The main job on one machine: a fleet that loses members, a model that writes. Minutes."""

    folder: Path | None = None
    """Where the run goes; a new folder below runs/ by default."""
    data: tuple[str, ...] = ()
    """Text to train on: paths, globs or python: (the default)."""
    generations: int = 48
    """Generations to publish (at least 8)."""
    minutes: float = 6.0
    """Stop training after so long, but not before 8 generations are there."""

    def run(self) -> int:
        from diffurefill.demo import run_demo

        return run_demo(self.folder, self.data, self.generations, self.minutes)


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
    """Short for --data.sources."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        import tempfile

        from diffurefill.fleet.create import create_run

        config = resolved(self.settings, self.data)
        with tempfile.TemporaryDirectory() as work:
            create_run(self.store, config, Path(work), say)
        say(f"next: diffurefill merger {self.store}  and  diffurefill worker {self.store}")
        return 0


@dataclass
class Worker:
    """Train for a run: adopt the global, take local steps, push, wait. May be killed any time."""

    store: Positional[str]
    worker: int | None = None
    """Number and data slot; the first one nobody holds by default. Never the same twice."""
    rounds: int | None = None
    """Stop after so many merged contributions."""
    minutes: float | None = None
    """How long this session lasts: what is trained by then is pushed before its end."""
    threads: int | None = None
    """Limit on CPU threads; one each for two workers on two cores."""

    def run(self) -> int:
        require_access(self.store)
        from diffurefill.fleet.start import start_worker

        start_worker(self.store, self.worker, self.rounds, self.minutes, self.threads, say)
        return 0


@dataclass
class Merger:
    """Average what the workers push into the next global. May be killed at any time."""

    store: Positional[str]
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

    def run(self) -> int:
        from diffurefill.fleet.manage import compact

        compact(self.store, say)
        return 0


@dataclass
class Audit:
    """Re-derive a run's history from its store and check it against the protocol's invariants."""

    store: Positional[str]

    def run(self) -> int:
        import tempfile

        from diffurefill.fleet.audit import audit_run
        from diffurefill.fleet.run import config_at
        from diffurefill.fleet.start import averager_of

        store = open_store(self.store)
        with tempfile.TemporaryDirectory() as work:
            audit = audit_run(store, averager_of(config_at(store).fleet), Path(work), progress)
        for line in (*audit.lines(), *audit.violations):
            say(line)
        say(
            f"audit: {audit.generations} generations, {audit.versions} versions, "
            f"{sum(audit.checks.values())} checks, {len(audit.violations)} violations"
        )
        return 1 if audit.violations else 0


@dataclass
class Train:
    """Train on this machine alone, without a fleet; continues where it was interrupted."""

    folder: Positional[Path]
    """Where weights, log and state go."""
    steps: int | None = None
    """Stop at this step; optim.total_steps by default."""
    preset: str = "demo"
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Short for --data.sources."""
    threads: int | None = None
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.fleet.alone import train_alone
        from diffurefill.runtime import set_threads

        set_threads(self.threads)
        train_alone(self.folder, resolved(self.settings, self.data), self.steps, say)
        return 0


@dataclass(kw_only=True)
class _Writing:
    """What generate and infill share."""

    model: Positional[str]
    """A run's store, or a folder made by `train`."""
    decode: str | None = None
    """A decode preset (decode-card, decode-left-to-right ...); the run's own by default."""
    weights: Weights = "ema"
    seed: int = 0
    watch: bool = False
    """Show the canvas pass by pass."""


@dataclass(kw_only=True)
class Generate(_Writing):
    """Continue prompts by draft and refill."""

    prompt: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Text to continue; give it several times for several."""
    num_tokens: int = 96
    """Tokens to write."""

    def run(self) -> int:
        from diffurefill.fleet.loading import load

        model = load(self.model, self.weights)
        texts = model.generate(
            self.prompt or ("",), self.num_tokens, stages=stages(self.decode), seed=self.seed,
            watch=self.watch,
        )  # fmt: skip
        for text in texts:
            say(text)
        return 0


@dataclass(kw_only=True)
class Infill(_Writing):
    """Fill gaps anywhere in a text, both sides in view."""

    text: str
    """The text, with [MASK*12] where 12 tokens are to be filled; any number of gaps."""

    def run(self) -> int:
        from diffurefill.fleet.loading import load

        model = load(self.model, self.weights)
        text = model.infill(self.text, stages=stages(self.decode), seed=self.seed, watch=self.watch)
        say(text)
        return 0


@dataclass
class Probe:
    """Held-out CE with stored masks, and decoding accuracy, of one or more models."""

    models: Positional[tuple[str, ...]]
    """Stores, or folders made by `train`."""
    json: bool = False
    """Print every figure, per row too, as JSON."""

    def run(self) -> int:
        from diffurefill.fleet.loading import probe_models

        probe_models(self.models, as_json=self.json)
        return 0


@dataclass
class Doctor:
    """What this machine offers, and whether a store on it is safe to use."""

    store: Positional[str | None] = None
    """A store to test: writes a little, on a lane of its own, and removes it."""

    def run(self) -> int:
        from diffurefill.runtime import doctor

        for name, value in doctor().items():
            say(f"{name:<12} {value}")
        if self.store is not None:
            open_store(self.store).selftest()
            say(f"{'store':<12} {self.store}: conditional writes are honoured")
        return 0


COMMANDS: dict[str, type[Any]] = {
    "demo": Demo,
    "init": Init,
    "worker": Worker,
    "merger": Merger,
    "status": Status,
    "rollback": Rollback,
    "compact": Compact,
    "audit": Audit,
    "simulate": Simulate,
    "train": Train,
    "generate": Generate,
    "infill": Infill,
    "probe": Probe,
    "doctor": Doctor,
}


def require_access(uri: str) -> None:
    """Denied now, before torch is loaded, where this process could not write to the run."""
    open_store(uri).check_access()


def resolved(settings: RunConfig, data: Sequence[str]) -> RunConfig:
    """The configuration with --data laid over it, printed."""
    settings = with_sources(settings, data)
    say(dumps(settings))
    return settings


def stages(preset: str | None) -> Any:
    return None if preset is None else load_preset(preset).decode.stages


def say(line: str) -> None:
    print(line, flush=True)


def progress(line: str) -> None:
    """A line on stderr, rewritten in place on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> Any:
    """The command object that `argv` (without the program's name) asks for."""
    name, rest = argv[0], list(argv[1:])
    command = COMMANDS[name]
    prog = f"diffurefill {name}"
    if "settings" not in command.__dataclass_fields__:
        return tyro.cli(command, args=rest, prog=prog)
    base = load_preset(_option(rest, "--preset") or "demo")
    path = _option(rest, "--config")
    default = command(tyro.MISSING, settings=load_file(path, base) if path else base)
    return tyro.cli(command, args=rest, prog=prog, default=default)


def _option(argv: Sequence[str], flag: str) -> str | None:
    """The value of `flag`, read before the full parser exists: it sets that parser's defaults."""
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _title(command: type[Any]) -> str:
    return (command.__doc__ or "").splitlines()[0]


def usage() -> str:
    lines = ["usage: diffurefill COMMAND [options]   (diffurefill COMMAND --help)", ""]
    lines += [f"  {name:<10} {_title(c)}" for name, c in COMMANDS.items()]
    return "\n".join([*lines, "", f"presets: {', '.join(preset_names())}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        say(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, n=1) or ["--help"]
        return _fail(f"no command {argv[0]!r}; did you mean `diffurefill {near[0]}`?", 2)
    started = time.monotonic()
    try:
        return parse(argv).run()
    except (UserError, Denied) as error:
        return _fail(str(error), 2)
    except StoreError as error:
        return _fail(f"the store could not be used: {error}; start again, nothing is lost", 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        return _fail(f"cannot write {error.filename}: {error.strerror}; free some space", 2)
    except KeyboardInterrupt:
        seconds = time.monotonic() - started
        return _fail(f"interrupted after {seconds:.0f} s; start it again to go on", 130)


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def entry() -> None:
    # A notebook or scheduler that ends a process sends SIGTERM: leave as for Ctrl-C, so that
    # temporary files go and the demo ends the processes it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())


if __name__ == "__main__":
    entry()
