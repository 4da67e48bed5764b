"""What truly happened to one run, as the ledger saw it, and what it holds against the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diffurefill.config import FleetConfig
from diffurefill.fleet.records import Identity
from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.kernel import Kernel
from diffurefill.fleet.simulate.provenance import Weights

Json = dict[str, Any]


@dataclass(eq=False)
class History:
    """The true history of one run."""

    hub: SimHub
    kernel: Kernel
    fleet: FleetConfig
    violations: list[str] = field(default_factory=list)
    state: Json = field(default_factory=dict)
    """The newest one."""
    first: dict[int, Json] = field(default_factory=dict)
    """The first state of each generation."""
    weights: dict[int, Weights] = field(default_factory=dict)
    """Each generation's weights, recomputed here."""
    lineage: list[int] = field(default_factory=list)
    """Generations whose work is in the current weights, oldest first."""
    accepted: dict[Identity, int] = field(default_factory=dict)
    rejected: dict[Identity, str] = field(default_factory=dict)
    pushed: dict[Identity, Json] = field(default_factory=dict)
    """Every manifest that ever lay on a worker's lane."""
    held: set[Identity] = field(default_factory=set)
    """Of them, those whose incarnation was the lane's, or was inherited by it."""
    inherited: set[Identity] = field(default_factory=set)
    """Of them, those that a later incarnation found on its lane."""
    elements: dict[str, int] = field(default_factory=dict)
    """Element of an accepted payload -> the generation it entered."""
    owners: dict[int, str] = field(default_factory=dict)
    """Who claimed each epoch."""
    num_released: int = 0
    """Terms given up."""
    lies: dict[Identity, str] = field(default_factory=dict)
    """Forged contributions (operators.py), by what is wrong with them."""
    writers: dict[str, str] = field(default_factory=dict)
    """Who wrote each lane's head."""
    leftovers: set[Identity] = field(default_factory=set)
    """Undecided contributions to the current global that a new term began with."""

    def check(self, invariant: str, holds: bool, what: str) -> None:
        if not holds:
            at = f"{invariant} at {self.kernel.now:.1f} s, seed {self.kernel.seed}"
            self.violations.append(f"{at}: {what}")

    def blob(self, sha256: str) -> bytes:
        return self.hub.blobs.get(sha256, b"")
