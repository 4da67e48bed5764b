"""What every bench shares: one JSON object on the last line, and a result file for a full run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from diffurefill.runtime import cpu_has_bf16, provenance

ROOT = Path(__file__).resolve().parents[1]


def report(name: str, figures: dict[str, Any], *, quick: bool) -> None:
    """Print `figures` as the last line; a full run also writes results/<name>.json."""
    if not quick:
        script = Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix()
        command = " ".join(["python", script, *sys.argv[1:]])
        record = {**figures, **provenance(command)}
        (ROOT / "results" / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(figures))


def on_this_cpu(name: str) -> str:
    """The result file `name`, one for CPUs that multiply bf16 by themselves and one for others:
    what training takes by default, and every ratio, are others on them."""
    return name if cpu_has_bf16() else f"{name}_without_bf16"


def peak_mb() -> float:
    """The most memory this process has held so far (resident, mapped files included), in MB.

    From /proc and not getrusage: the kernel lets a child inherit its parent's maximum there.
    """
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return round(kilobytes * 1024 / 1e6, 1)
