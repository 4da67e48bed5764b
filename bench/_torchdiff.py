"""The steps of the published package slm388-torchdiff for bench/train.py, in its own process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diffurefill.config import RunConfig

MODES = {
    "torchdiff_default": "default shipped",
    "torchdiff_plain": "plain shipped",
    "torchdiff_default_fp32": "default fp32",
    "torchdiff_plain_fp32": "plain fp32",
}


@contextmanager
def torchdiff_steps(
    python: str, config: RunConfig, threads: int
) -> Iterator[dict[str, Callable[[], float]]]:
    """Its steps, each returning its CPU seconds, in a process of `python` that waits while others
    are timed."""
    model = config.model
    shape = {
        **{n: getattr(model, n) for n in ("vocab_size", "width", "layers", "heads", "ffn_width")},
        "batch_rows": config.train.batch_rows,
        "row_length": config.data.row_length,
        "threads": threads,
    }
    script = Path(__file__).with_name("_torchdiff_step.py")
    command = [python, str(script), json.dumps(shape)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(request: str) -> float:
        print(request, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"{python} failed on {request!r}: its message is above")
        return float(answer)

    if not process.stdout.readline():
        raise SystemExit(f"{python} cannot run {script.name}: has it slm388-torchdiff?")
    try:
        yield {name: lambda request=request: ask(request) for name, request in MODES.items()}
    finally:
        process.stdin.close()
        process.wait()


def default_mode_tokens(config: RunConfig) -> dict[str, int]:
    """Tokens that a step in torchdiff's default mode reads, beside all of the batch."""
    B, T = config.train.batch_rows, config.data.row_length
    return {"read": B * max(1, T // 2 // 20) * 20, "of": B * T}
