"""What a run's training cost by the exact count, from what its workers logged."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from diffurefill.fleet import records
from diffurefill.fleet.found import Found
from diffurefill.fleet.log import read_log
from diffurefill.fleet.run import Run
from diffurefill.store.base import Store


def with_flops(found: Found, run: Run) -> Found:
    """`found` with `flops` in its provenance: its tokens times the FLOPs a token, the mean of the
    intervals that are still in the logs. As it was where no log tells them."""
    per_token = logged_flops_per_token(run.store)
    tokens = found.provenance.get("tokens")
    if not per_token or tokens is None:
        return found
    return replace(found, provenance={**found.provenance, "flops": fmean(per_token) * tokens})


def logged_flops_per_token(store: Store) -> list[float]:
    """One figure an interval that a worker trained and pushed."""
    workers = [n for lane in store.lanes() if (n := records.worker_of(lane)) is not None]
    return [
        record["flops_per_token"]
        for worker in workers
        for record in read_log(store, worker)
        if record["phase"] == "push" and "flops_per_token" in record
    ]
