"""A model of the report's merger, for comparison: slower than ours in two ways.

The report describes what its merger did and not how; these are our readings of it, and the reason
why its fleet waited for a quarter of the time:
- it looked at the checkpoints' tags and downloaded them one after another when the round closed;
- the EMA was uploaded together with the global that the workers were waiting for.
It had no digests to make and no gates to pass, so it is not charged for them (capacity.py). All
else is the product's own code, with whole fp32 files both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diffurefill.fleet import records
from diffurefill.fleet.merger import Merger
from diffurefill.fleet.merging import Attempt
from diffurefill.fleet.simulate.sized import DELTA, MeteredStore
from diffurefill.store.base import Ref


class DeferringStore(MeteredStore):
    """Contributions are looked at at once, and downloaded when `settle` is called."""

    owed_seconds: float = 0.0

    def fetch(self, ref: Ref, dest: Path) -> Path:
        before = self.process.spent
        path = super().fetch(ref, dest)
        if path.read_text().split(" ")[1] == DELTA:
            self.owed_seconds += self.process.spent - before
            self.process.spent = before
        return path

    def settle(self) -> float:
        """Seconds that the deferred downloads take, one after another."""
        owed, self.owed_seconds = self.owed_seconds, 0.0
        return owed


class ReportMerger(Merger):
    """To be opened on a DeferringStore."""

    def _merge(self) -> Iterator[float]:
        store = self._run.store
        assert isinstance(store, DeferringStore)
        yield store.settle()
        yield from super()._merge()

    def _advance(self, attempt: Attempt) -> Iterator[float]:
        """The EMA goes up first. The second publish then finds it at the hub and is cheap."""
        path = self._run.cache / f"{self.merger_id}.{records.EMA}"
        yield from self._io(lambda: self._run.store.stage(path))
        yield from super()._advance(attempt)
