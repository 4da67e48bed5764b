"""What the commands share: lines for people, and what several of them ask for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from diffurefill.config import RunConfig, dumps, with_paths
from diffurefill.store.base import open_store


def say(line: str) -> None:
    """A line on stdout, in the place of a progress line that stands on the terminal."""
    progress("")
    print(line, flush=True)


def progress(line: str) -> None:
    """A line on stderr, rewritten in place on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


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
