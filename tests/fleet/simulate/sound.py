"""What every simulated run must end with: a clean ledger and a clean audit of the hub."""

from __future__ import annotations

from pathlib import Path

from diffurefill.fleet.audit import Audit, audit_run
from diffurefill.fleet.simulate.provenance import ExactAverager
from diffurefill.fleet.simulate.scenario import World


def expect_sound(world: World, folder: Path) -> Audit:
    """The ledger watched every version; the audit sees only what lies in the hub now."""
    assert world.violations == []
    audit = audit_run(world.hub, ExactAverager(), folder, lambda line: None)
    assert audit.verdict == "ok"
    assert audit.generations == world.gen
    return audit
