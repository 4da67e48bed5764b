"""Re-derive a run's whole history from its store and hold it against the protocol's invariants.

Nothing is believed that can be recomputed: every blob is verified by its sha256, every accepted
contribution is looked up on its worker's own lane, and every global and every average is computed
again from its recorded inputs and compared byte for byte. What a compaction deleted is counted as
not checked; the rules on records still see the whole history. Source: spec fleet.md 4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diffurefill.fleet.audit_findings import INVARIANTS, LIMITS, Audit
from diffurefill.fleet.audit_history import Reader, insist, read_history
from diffurefill.fleet.audit_pushes import (
    check_leftovers,
    check_rejections,
    check_repeats,
    check_steps_of_workers,
    refused_as_damaged,
)
from diffurefill.fleet.audit_rules import check_records
from diffurefill.fleet.audit_weights import WeightsAudit
from diffurefill.fleet.averager import Averager
from diffurefill.store.base import MAIN, NoRun, Store

__all__ = ["INVARIANTS", "LIMITS", "Audit", "audit_run"]


def audit_run(
    store: Store, averager: Averager, work: Path, report: Callable[[str], None] = print
) -> Audit:
    """Check every published version of the run at `store`.

    `averager` must be the run's own arithmetic (start.averager_of). `work`, a folder of its own,
    holds the files of one generation at a time.
    """
    head = insist(lambda: store.head(MAIN))
    if head is None:
        raise NoRun(store.uri)
    work.mkdir(parents=True, exist_ok=True)
    audit = Audit()
    reader = Reader(store, work, audit)
    history = read_history(reader, head)
    if history is None:
        return audit
    reader.excused = refused_as_damaged(history)
    check_records(history, audit)
    check_repeats(history, audit)
    check_rejections(history, averager.codecs, audit)
    check_leftovers(history, audit)
    check_steps_of_workers(history, audit)
    WeightsAudit(history, reader, averager, report).check()
    reader.forget()
    report("audit: every other file")
    reader.verify_rest(history.versions, history.boundary)
    for lane in history.lanes.values():
        reader.verify_rest(lane.versions, lane.boundary)
    return audit
