"""What an audit holds a run against, and what it found. Source: spec fleet.md 4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

INVARIANTS = {
    "files": "every file that a version names has its size and sha256",
    "I1": "generations grow one by one and are never reused",
    "I2": "one generation is one set of weights, in every version and snapshot",
    "I3": "every contribution was made on the global it was merged into, or on one late enough",
    "I4": "no contribution was accepted twice, or after it was rejected",
    "I5": "nothing enters from outside a global's lineage; a rollback restores exactly its target",
    "I6": "state, weights and averages of one version belong together",
    "I7": "epochs never fall, and each has one merger, which alone publishes in it",
    "I8": "every global is finite and has the run's tensors",
    "I9": "every global is, byte for byte, the outer step along its recorded inputs",
    "I10": "EMA and SWA hold exactly the generations that they claim",
    "I11": "a slot's rows follow each other along the lineage: none twice, none left out",
    "I12": "the step grows by the longest merged interval, and workers train at it",
    "I13": "a merge takes the memory of two models at most",
    "I14": "compaction kept the head and the record of every generation",
    "I15": "what lay on a lane was merged or refused on record, and nothing sound was refused",
    "I16": "what was accepted is in the token count, and every version tells the same of it",
}
LIMITS = {
    "I13": "not visible in a store: measured by bench/",
    "I15": "reasons that rest on the bytes of what was refused are the tests' to check",
}
"""What a store's history cannot show."""


@dataclass
class Audit:
    """What was checked how often, and what was found. `violations` is empty for a sound run."""

    generations: int = 0
    versions: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    """Checks left out because a compaction had deleted what they need."""
    violations: list[str] = field(default_factory=list)

    def check(self, invariant: str, holds: bool, what: str) -> bool:
        self.checks[invariant] += 1
        if not holds:
            self.violations.append(f"{invariant} violated: {what}")
        return holds

    @property
    def verdict(self) -> str:
        """`ok`, or the first violation."""
        return self.violations[0] if self.violations else "ok"

    def lines(self) -> Iterator[str]:
        """One for each invariant: its mark, how often it was checked, its promise."""
        for name, promise in INVARIANTS.items():
            bad = sum(v.startswith(f"{name} ") for v in self.violations)
            done, left = self.checks[name], self.unchecked[name]
            mark = f"VIOLATED {bad} times" if bad else "ok" if done else "not checked"
            without = f" ({left:,} not checked)" if left else ""
            limit = f" [{LIMITS[name]}]" if name in LIMITS else ""
            yield f"{name:>5}  {mark:<18} {done:>7,} checks{without}  {promise}{limit}"
