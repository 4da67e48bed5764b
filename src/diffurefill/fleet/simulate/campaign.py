"""Many seeds: what they violate, what was injected and what became of it, in a form to keep.

A tally is plain data: blocks of seeds are tallied in any process and added up in order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from diffurefill.config import UserError
from diffurefill.fleet.simulate.chaos import Outcome, run_seed
from diffurefill.fleet.simulate.profiles import PROFILES

Tally = dict[str, Any]

MAX_SHOWN = 20
"""Violations a tally keeps the text of."""


def tally(seeds: Iterable[int]) -> Tally:
    """Run the seeds, each under the profile that it chooses."""
    found = empty()
    digest = hashlib.sha256()
    for seed in seeds:
        outcome = run_seed(seed)
        digest.update(outcome.trace_hash.encode())
        _count(found, outcome)
    return {**found, "digests": [digest.hexdigest()]}


def empty() -> Tally:
    return {
        "seeds": 0, "violations": 0, "violated": [], "digests": [], "generations": 0, "events": 0,
        "launches": 0, "profiles": {}, "injected": {}, "outcomes": {}, "endings": {},
        "exercised": {},
    }  # fmt: skip


def _count(found: Tally, outcome: Outcome) -> None:
    found["seeds"] += 1
    found["violations"] += len(outcome.violations)
    found["violated"] = [*found["violated"], *outcome.violations][:MAX_SHOWN]
    found["generations"] += outcome.generations
    found["events"] += outcome.events
    found["launches"] += sum(outcome.endings.values())
    _add(found["profiles"], {outcome.profile: 1})
    _add(found["injected"], outcome.injected)
    _add(found["endings"], outcome.endings)
    _add(found["exercised"], outcome.exercised)
    for (kind, what), count in outcome.outcomes.items():
        _add(found["outcomes"].setdefault(kind, {}), {what: count})


def _add(total: dict[str, int], more: dict[str, int] | Counter[str]) -> None:
    for key, count in more.items():
        total[key] = total.get(key, 0) + count


def added(tallies: Iterable[Tally]) -> Tally:
    """The sum, in the given order; every count by falling size."""
    total = empty()
    for one in tallies:
        for key in ("seeds", "violations", "generations", "events", "launches"):
            total[key] += one[key]
        total["violated"] = [*total["violated"], *one["violated"]][:MAX_SHOWN]
        total["digests"] += one["digests"]
        for key in ("profiles", "injected", "endings", "exercised"):
            _add(total[key], one[key])
        for kind, counts in one["outcomes"].items():
            _add(total["outcomes"].setdefault(kind, {}), counts)
    for key in ("injected", "endings"):
        total[key] = _sorted(total[key])
    ordered = sorted(total["outcomes"].items())
    total["outcomes"] = {kind: _sorted(counts) for kind, counts in ordered}
    return total


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def digest_of(digests: Iterable[str]) -> str:
    """One digest over blocks' digests: two machines that agree on it saw the same traces."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def replay(
    seed: int, profile: str | None = None, report: Callable[[str], None] = print
) -> list[str]:
    """Run one seed again and tell everything that happens; returns its violations."""
    if profile is not None and profile not in PROFILES:
        raise UserError(f"no profile {profile!r}: it is one of {', '.join(PROFILES)}")
    outcome = run_seed(seed, profile, keep_trace=True)
    for line in outcome.trace:
        report(line)
    for violation in outcome.violations:
        report(violation)
    report(
        f"seed {seed}, profile {outcome.profile}: {outcome.generations} generations, "
        f"{outcome.events} events, {sum(outcome.injected.values())} faults, "
        f"{len(outcome.violations)} violations, trace {outcome.trace_hash[:16]}"
    )
    return outcome.violations
