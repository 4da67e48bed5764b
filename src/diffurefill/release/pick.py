"""`pick`: which of a run's weights to release, by its probes (the report's Table 5).

The rule. The leader has the lowest held-out CE. A candidate is out when some figure is worse than
the leader's by an interval that leaves out 0: paired over the same items, 95%, by bootstrap. Of
those left, which cannot be told from the leader, the one that averages most is taken: SWA, then
means of the last k (largest k first), then EMA, then the global. An average of many differs least
from what the next run would give, and the report released its SWA on differences as small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diffurefill.config import HELD_OUT
from diffurefill.evaluate.scores import Scores, differences
from diffurefill.evaluate.statistics import Interval
from diffurefill.fleet.found import each_in_run
from diffurefill.fleet.loading import build
from diffurefill.fleet.probing import Asked, score_model
from diffurefill.fleet.run import Run
from diffurefill.store.base import sha256_file

LAST = (3, 5)
"""The means of the last k that the report compares."""
FACT_NLL = "fact_nll"
RULE = (
    "lowest held-out CE leads; out is what is worse than it on some figure by a 95% interval "
    "without 0; of the rest SWA, then last-k (largest first), then EMA, then global"
)


@dataclass(frozen=True)
class Candidate:
    kind: str
    sha256: str
    scores: Scores


@dataclass(frozen=True)
class Picked:
    run_id: str
    generation: int
    kind: str
    leader: str
    candidates: tuple[Candidate, ...]
    """The leader first, the others by held-out CE."""
    missing: dict[str, str]
    """Weights that the run does not have, and why."""

    def against_leader(self) -> dict[str, dict[str, Interval]]:
        """By kind: each figure minus the leader's, with its interval."""
        first = self.candidates[0].scores
        return {c.kind: differences(c.scores, first) for c in self.candidates}

    def out(self) -> dict[str, list[str]]:
        """By kind: the figures on which it is worse than the leader, for those that are out."""
        first = self.candidates[0].scores
        worse = {c.kind: worse_on(c.scores, first) for c in self.candidates}
        return {kind: names for kind, names in worse.items() if names}

    def to_json(self) -> dict[str, Any]:
        against = self.against_leader()
        return {
            "result": "pick",
            "rule": RULE,
            "run_id": self.run_id,
            "generation": self.generation,
            "picked": self.kind,
            "leader": self.leader,
            "out": self.out(),
            "missing": self.missing,
            "candidates": [
                {
                    "weights": c.kind,
                    "sha256": c.sha256,
                    **c.scores.to_json(),
                    "against_leader": {n: d.to_json() for n, d in against[c.kind].items()},
                }
                for c in self.candidates
            ],
        }


def pick_weights(
    run: Run,
    report: Callable[[str], None],
    *,
    last: Sequence[int] = LAST,
    asked: Asked | None = None,
) -> Picked:
    """Score every kind of weights that the run has now, one model at a time in memory."""
    kinds = ("global", "ema", "swa", *(f"last-{k}" for k in last))
    now, candidates = run.snapshot(), []
    there, not_there = each_in_run(run, now, kinds)
    # The result is for everyone to read: it does not say where the run lies.
    missing = {k: str(why).removeprefix(f"{run.store.uri}: ") for k, why in not_there.items()}
    for kind, found in there.items():
        scores = score_model(build(found), found.name, asked or Asked())
        candidates.append(Candidate(kind, sha256_file(found.weights).sha256, scores))
        report(f"probed {found.name}")
    candidates.sort(key=lambda c: c.scores.sets[HELD_OUT].mean)
    kind = choose(candidates)
    leader = candidates[0].kind
    return Picked(now.state.run_id, now.state.gen, kind, leader, tuple(candidates), missing)


def choose(candidates: Sequence[Candidate]) -> str:
    """The kind to release, by the rule above. `candidates`: by held-out CE, the leader first."""
    leader = candidates[0]
    equal = [c for c in candidates if not worse_on(c.scores, leader.scores)]
    return min((c.kind for c in equal), key=preference)


def worse_on(found: Scores, leader: Scores) -> list[str]:
    """The figures that are worse by an interval without 0: CE or NLL above, a share below."""
    worse = []
    for name, difference in differences(found, leader).items():
        lower_is_better = name in found.sets or name == FACT_NLL
        if difference.low > 0 if lower_is_better else difference.high < 0:
            worse.append(name)
    return worse


def preference(kind: str) -> tuple[int, int]:
    """Sorts what averages most to the front."""
    if kind.startswith("last-"):
        return 1, -int(kind.removeprefix("last-"))
    return {"swa": 0, "ema": 2, "global": 3}[kind], 0
