"""Which optional parts of the protocol a simulated fleet really used: a silent gap shows here."""

from __future__ import annotations

from collections import Counter

from diffurefill.fleet.simulate.scenario import World


def exercised(world: World) -> Counter[str]:
    """How often each was used in the life of `world`."""
    ledger, fleet, found = world.ledger, world.fleet, Counter[str]()
    found["snapshots"] = len(ledger.state["snapshots"])
    for gen, state in ledger.first.items():
        found["downlink updates"] += state["update"] is not None
        found["rollbacks"] += state["restored_from"] is not None
        accepted = state["accepted"]
        found["contributions merged"] += len(accepted)
        found["of them late"] += sum(c["base_gen"] < gen - 1 for c in accepted)
        found["of them partial"] += sum(c["steps"] < fleet.local_steps for c in accepted)
        if fleet.adoption == "keep_drift":
            found["of them with kept drift"] += len(accepted)
    found["of them of a dead incarnation"] = len(ledger.inherited & ledger.accepted.keys())
    found["terms"] = len(ledger.owners)
    found["terms given up"] = ledger.num_released
    found["files put back from a copy"] = world.num_restaged
    found["squashes"] = world.hub.num_squashed
    found["EMA folds"] = (ledger.state["ema"] or {"count": 0})["count"]
    found["SWA folds"] = (ledger.state["swa"] or {"count": 0})["count"]
    return +found
