"""`diffurefill COMMAND`: the table of commands, and what becomes of their errors.

Exit codes: 0 done, 1 a check failed or the store could not be used, 2 a mistake in what was asked
for (one line says what to do), 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import tyro

from diffurefill.commands.bench import BenchAttention, BenchCache, BenchOptimizer, BenchTrain
from diffurefill.commands.card import Card
from diffurefill.commands.collocations import Collocations
from diffurefill.commands.common import progress, say
from diffurefill.commands.data import Inspect, Pack, Preview
from diffurefill.commands.doctor import Doctor
from diffurefill.commands.evaluate import Evaluate, LmEval
from diffurefill.commands.facts import Facts
from diffurefill.commands.fleet import Audit, Compact, Init, Merger, Rollback, Status, Worker
from diffurefill.commands.model import Demo, Generate, Infill, Train
from diffurefill.commands.pilot import BenchPilot
from diffurefill.commands.probe import Probe, ProbeFacts
from diffurefill.commands.release import Export, Import, Pick
from diffurefill.commands.speed import BenchSpeed
from diffurefill.config import UserError, load_file, load_preset, preset_names
from diffurefill.fleet.simulate.command import Simulate
from diffurefill.store.base import Busy, Conflict, Denied, StoreError, Unknown

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
    "card": Card,
    "probe facts": ProbeFacts,
    "pick": Pick,
    "export": Export,
    "import": Import,
    "evaluate": Evaluate,
    "lm-eval": LmEval,
    "doctor": Doctor,
    "data inspect": Inspect,
    "data preview": Preview,
    "data pack": Pack,
    "data collocations": Collocations,
    "data facts": Facts,
    "bench train": BenchTrain,
    "bench pilot": BenchPilot,
    "bench speed": BenchSpeed,
    "bench cache": BenchCache,
    "bench attention": BenchAttention,
    "bench optimizer": BenchOptimizer,
}
"""A command of two words belongs to the group that the first one names."""
PASSING = (Busy, Conflict, Unknown)
"""What may have gone when the command is given again; the others say themselves what to do."""
WAYS_OUT = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "the system allows no larger file (ulimit -f): raise that limit",
    errno.EROFS: "name another place",
    errno.EACCES: "name another place, or allow it",
    errno.ENAMETOOLONG: "give it a shorter name",
}
"""What to do where a file cannot be written."""


def parse(argv: Sequence[str]) -> Any:
    """The command object that `argv` (without the program's name) asks for."""
    name = _command_name(argv)
    command, rest = COMMANDS[name], list(argv[len(name.split()) :])
    if hasattr(command, "from_arguments"):  # another program's flags, not ours to read
        return command.from_arguments(rest)
    prog = f"diffurefill {name}"
    fields = command.__dataclass_fields__
    if "settings" not in fields:
        return tyro.cli(command, args=rest, prog=prog)
    usual = fields["preset"].default if "preset" in fields else None
    base = load_preset(_option(rest, "--preset") or usual or "demo")
    path = _option(rest, "--config")
    required = {
        f.name: tyro.MISSING
        for f in dataclasses.fields(command)
        if f.default is f.default_factory is dataclasses.MISSING
    }
    default = command(**required, settings=load_file(path, base) if path else base)
    return tyro.cli(command, args=rest, prog=prog, default=default)


def _option(argv: Sequence[str], flag: str) -> str | None:
    """The last value of `flag`, read before the full parser exists: it sets that one's defaults."""
    value = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _command_name(argv: Sequence[str]) -> str:
    """The command that `argv` begins with, known or not."""
    two = " ".join(argv[:2])
    is_group = any(name.startswith(f"{argv[0]} ") for name in COMMANDS)
    return two if two in COMMANDS or (is_group and argv[0] not in COMMANDS) else argv[0]


def _title(command: type[Any]) -> str:
    return (command.__doc__ or "").splitlines()[0]


def usage(group: str = "") -> str:
    """All commands, or those of one group."""
    lines = ["usage: diffurefill COMMAND [options]   (diffurefill COMMAND --help)", ""]
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines += [f"  {name:<{width}} {_title(command)}" for name, command in shown.items()]
    return "\n".join([*lines, "", f"presets: {', '.join(preset_names())}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        say(usage())
        return 0 if argv else 2
    name = _command_name(argv)
    if name not in COMMANDS:
        import difflib

        asks_for_help = len(argv) == 1 or argv[1] in ("-h", "--help")
        if asks_for_help and any(known.startswith(f"{argv[0]} ") for known in COMMANDS):
            say(usage(f"{argv[0]} "))
            return 0 if len(argv) > 1 else 2
        near = difflib.get_close_matches(name, COMMANDS, n=1) or ["--help"]
        return _fail(f"no command {name!r}; did you mean `diffurefill {near[0]}`?", 2)
    started = time.monotonic()
    try:
        return parse(argv).run()
    except (UserError, Denied) as error:
        return _fail(str(error), 2)
    except StoreError as error:
        ends = "; start again, nothing is lost" if isinstance(error, PASSING) else ""
        return _fail(f"the store could not be used: {error}{ends}", 1)
    except OSError as error:
        if error.errno not in WAYS_OUT:
            raise
        file = error.filename or "a file"
        return _fail(f"cannot write {file}: {error.strerror}; {WAYS_OUT[error.errno]}", 2)
    except KeyboardInterrupt:
        seconds = time.monotonic() - started
        return _fail(f"interrupted after {seconds:.0f} s; start it again to go on", 130)


def _fail(message: str, code: int) -> int:
    progress("")
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def entry() -> None:
    # A notebook or scheduler that ends a process sends SIGTERM: leave as for Ctrl-C, so that
    # temporary files go and the demo ends the processes it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A terminal or pipe may not know every character that a model writes.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        code = main()
    except BrokenPipeError:
        # Whoever read our output (`| head`) has had enough. Python would complain once more when it
        # flushes on its way out. The store's own broken connections are StoreErrors by now.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


if __name__ == "__main__":
    entry()
