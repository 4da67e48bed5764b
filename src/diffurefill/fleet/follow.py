"""The second publish: EMA, SWA, snapshots and a late whole global follow each generation.

Off the critical path: workers train on the new global meanwhile. A merger that died in between
left the records behind the generation, and its successor does it first, from the kept global.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from diffurefill.fleet import protocol, records
from diffurefill.fleet.averager import Averager
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import Average, Fold, State
from diffurefill.fleet.run import Run, Snapshot
from diffurefill.store.base import Change, Ref


class Followers:
    """What follows a global, for one merger. Its files are named by the merger's id."""

    def __init__(self, run: Run, averager: Averager, name: str, io: Patience) -> None:
        self._run, self._averager, self._name, self._io = run, averager, name, io
        self._folded_sha: str | None = None
        """The global that the folds' files already hold, from the merge's own pass."""

    def due(self, state: State) -> bool:
        """Whether something of this generation is still to be published."""
        config = self._run.config.fleet
        return (
            protocol.ema_is_due(state)
            or protocol.swa_is_due(state, config)
            or protocol.snapshot_is_due(state, config)
            or protocol.full_is_due(state)
        )

    def folds(self, state: State) -> Generator[float, None, dict[str, Fold]]:
        """{path on the lane: fold} of the averages that `state`'s global is missing from."""
        found = {}
        if protocol.ema_is_due(state):
            keep = self._run.config.fleet.ema_decay
            found[records.EMA] = yield from self._fold(records.EMA, state.ema, keep)
        if protocol.swa_is_due(state, self._run.config.fleet):
            n = state.swa.count + 1 if state.swa else 1
            found[records.SWA] = yield from self._fold(records.SWA, state.swa, (n - 1) / n)
        return found

    def _fold(
        self, path: str, average: Average | None, keep: float
    ) -> Generator[float, None, Fold]:
        previous = None
        if average is not None:
            ref = average.ref
            previous = yield from self._io(lambda: self._run.fetch(ref))
        return Fold(previous, keep, self._run.cache / f"{self._name}.{path}")

    def folded(self, sha256: str) -> None:
        """The merge's pass has written the folds' files for this global."""
        self._folded_sha = sha256

    def changes(self, now: Snapshot) -> Generator[float, None, tuple[State, dict[str, Change]]]:
        """The state and files of the second publish; no files when nothing is due."""
        state, config = now.state, self._run.config.fleet
        changes: dict[str, Change] = {}
        if not self.due(state):
            return state, changes
        weights = yield from self._io(
            lambda: self._run.fetch_global(now, self._averager.apply_update)
        )
        folds = yield from self.folds(state)
        if folds and self._folded_sha != state.global_weights.sha256:
            self._averager.fold(weights, list(folds.values()))
        self._folded_sha = None
        for path, fold in folds.items():
            ref = yield from keep(self._run, self._io, fold.dest)
            changes[path] = ref
            if path == records.EMA:
                state = replace(state, ema=protocol.averaged(state.ema, ref, state.gen))
            else:
                state = replace(state, swa=protocol.averaged(state.swa, ref, state.gen))
        if protocol.full_is_due(state):
            changes[records.GLOBAL] = yield from self._io(lambda: self._run.store.stage(weights))
            state = replace(state, full_gen=state.gen)
        if protocol.snapshot_is_due(state, config):
            before = state.snapshots
            state = protocol.with_snapshot(state, config.snapshot_keep)
            changes |= {records.snapshot_path(s.gen): None for s in before}
            changes |= {records.snapshot_path(s.gen): s.ref for s in state.snapshots}
        return state, changes

    def keep_local(self, state: State) -> None:
        """Delete local copies that the next merge does not need."""
        files = [state.global_weights, state.update]
        files += [a.ref for a in (state.ema, state.swa, state.momentum) if a is not None]
        self._run.forget({ref.sha256 for ref in files if ref is not None})


def keep(run: Run, io: Patience, path: Path) -> Generator[float, None, Ref]:
    """Stage a file made here and keep it as the local copy of its digest."""
    ref = yield from io(lambda: run.store.stage(path))
    path.replace(run.path_of(ref))
    return ref
