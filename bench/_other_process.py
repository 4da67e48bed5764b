"""Steps that are taken in a process of their own, for bench/train.py to time by turns."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def steps_of(
    command: Sequence[str], requests: Mapping[str, str]
) -> Iterator[dict[str, Callable[[], float]]]:
    """Its steps by name, each returning its CPU seconds, in a process that waits while others are
    timed: it says a line once it is ready, and answers each request with seconds."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(request: str) -> float:
        print(request, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"{command[:2]} failed on {request!r}: its message is above")
        return float(answer)

    if not process.stdout.readline():
        raise SystemExit(f"{command[:2]} does not run: its message is above")
    try:
        yield {name: lambda request=request: ask(request) for name, request in requests.items()}
    finally:
        process.stdin.close()
        process.wait()
