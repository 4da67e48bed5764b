"""What the commands share: lines for people, and what several of them ask for."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from diffurefill.config import RunConfig, dumps, with_paths
from diffurefill.store.base import open_store

RIGHT_MASKS = 8
"""Room for a sentence's end and EOS behind a continuation. A model trained on whole documents knows
that its row ends with EOS: with no room the last token is scored against it, and a greedy flag
(LAMBADA) is never true."""
PLAIN_SECONDS = 30.0
"""Between two plain lines of progress, where they cannot be rewritten: a log is to be read."""
_silent_since: float | None = None


def say(line: str) -> None:
    """A line on stdout, in the place of a progress line that stands on the terminal."""
    progress("")
    print(line, flush=True)


def progress(line: str) -> None:
    """A line on stderr, rewritten in place on a terminal; elsewhere a plain one now and then. An
    empty one says that the job is over, or speaks for itself."""
    global _silent_since
    now = time.monotonic()
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif not line:
        _silent_since = None
    elif _silent_since is None:
        _silent_since = now
    elif now - _silent_since >= PLAIN_SECONDS:
        print(line, file=sys.stderr, flush=True)
        _silent_since = now


def resolved(settings: RunConfig, data: Sequence[str], *, quietly: bool = False) -> RunConfig:
    """The configuration with --data laid over it, printed unless `quietly`."""
    settings = with_paths(settings, data)
    if not quietly:
        say(dumps(settings))
    return settings


def require_access(uri: str) -> None:
    """Denied now, before torch is loaded, where this process could not write to the run."""
    open_store(uri).check_access()


def provenance_as_typed() -> dict[str, Any]:
    """What a result file says of how to make it again, with the words of this call."""
    from diffurefill.runtime import provenance

    return provenance(" ".join(["diffurefill", *sys.argv[1:]]))
