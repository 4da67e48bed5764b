"""The audit's second half: every global and average, computed again from what is in the store.

At any time the folder holds the files of one generation: its base, its payloads, its averages.
Source: spec fleet.md 4 (I8, I9, I10).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diffurefill.fleet import protocol
from diffurefill.fleet.audit_history import History, Reader
from diffurefill.fleet.averager import Averager
from diffurefill.fleet.records import Average, Contribution, Fold, Payload, State
from diffurefill.store.base import Ref, sha256_file

WEIGHTS_CODEC = "fp32-delta"
"""A file of weights is one of its own differences from zero."""


class WeightsAudit:
    def __init__(
        self, history: History, reader: Reader, averager: Averager, report: Callable[[str], None]
    ) -> None:
        self._history, self._reader, self._averager = history, reader, averager
        self._audit, self._work, self._report = reader.audit, reader.work, report
        self._inspected: set[Ref] = set()

    def check(self) -> None:
        for gen, now in self._history.first.items():
            parent = self._history.first.get(-1 if now.parent_gen is None else now.parent_gen)
            if now.restored_from is None and parent is not None:
                self._report(f"audit: generation {gen}")
                self._check_merge(parent, now)
            self._check_weights(now, parent)
            for name, path in (("ema", self._ema_keep), ("swa", _swa_keep)):
                self._check_average(name, path, now)
            self._reader.forget(now.global_weights)

    # --- globals ---------------------------------------------------------------------------------

    def _check_weights(self, now: State, parent: State | None) -> None:
        """I8: each set of weights once."""
        if now.global_weights in self._inspected:
            return
        weights = self._whole(now)
        if weights is None:
            self._audit.unchecked["I8"] += 1
            return
        self._inspected.add(now.global_weights)
        base = self._whole(parent) if parent else None
        fault = self._averager.inspect(weights, self._codec, base or weights).fault
        self._audit.check("I8", fault is None, f"generation {now.gen}: {fault}")

    @property
    def _codec(self) -> str:
        codecs = self._averager.codecs
        return WEIGHTS_CODEC if WEIGHTS_CODEC in codecs else next(iter(codecs))

    def _check_merge(self, parent: State, now: State) -> None:
        """I9: weights, momentum and downlink update from base, payloads and earlier momentum."""
        base, momentum = self._whole(parent), None
        accepted = protocol.summation_order(now.accepted)
        paths = [self._payload(c) for c in accepted]
        earlier = parent.momentum if self._averager.needs_momentum else None
        if earlier is not None and earlier.gen == parent.gen:
            momentum = self._fetch(earlier.ref, parent.gen)
            paths.append(momentum)
        if base is None or None in paths:
            self._audit.unchecked["I9"] += 1
            return
        discount = self._history.config.staleness_discount
        payloads = [
            Payload(path, c.codec, protocol.merge_weight(c, parent, discount))
            for path, c in zip(paths, accepted, strict=False)
            if path is not None
        ]
        made = self._work / "recomputed"
        moved = self._work / "momentum" if self._averager.needs_momentum else None
        update = self._work / "update" if now.update else None
        what = f"generation {now.gen} is not the outer step along its recorded contributions"
        try:
            self._averager.merge(
                base, payloads, made, momentum=momentum, momentum_dest=moved, update_dest=update
            )
        except (ValueError, KeyError) as error:
            self._audit.check("I9", False, f"{what}: {error}")
            return
        same = self._audit.check("I9", sha256_file(made) == now.global_weights, what)
        if moved is not None:
            kept = now.momentum is not None and sha256_file(moved) == now.momentum.ref
            self._audit.check("I9", kept, f"generation {now.gen}: its momentum is another one")
        if update is not None:
            self._check_update(now, base, update)
        if same and not self._is_whole(now):  # only its update was ever published
            made.replace(self._work / now.global_weights.sha256)

    def _check_update(self, now: State, base: Path, update: Path) -> None:
        """What a worker makes of the published update must be the global, byte for byte."""
        same = sha256_file(update) == now.update
        self._audit.check("I9", same, f"generation {now.gen}: its update is another one")
        applied = self._work / "applied"
        self._averager.apply_update(base, update, applied)
        made = sha256_file(applied) == now.global_weights
        self._audit.check("I9", made, f"generation {now.gen} is not what its update makes")

    def _payload(self, c: Contribution) -> Path | None:
        lane = self._history.lanes.get(c.worker)
        gone = lane is not None and c.base_gen < lane.compacted_gen
        return self._reader.fetch(c.payload, may_be_gone=gone)

    def _whole(self, state: State) -> Path | None:
        """A generation's weights; a whole file of the newest one may still be to come."""
        local = self._work / state.global_weights.sha256
        if local.exists():
            return local
        return self._fetch(state.global_weights, state.gen) if self._is_whole(state) else None

    def _is_whole(self, state: State) -> bool:
        """Whether the generation's whole global was ever published."""
        last = self._history.last(state.gen) or state
        return last.full_gen == state.gen or self._history.follows(state.gen)

    def _fetch(self, ref: Ref, gen: int) -> Path | None:
        return self._reader.fetch(ref, may_be_gone=gen < self._history.compacted_gen)

    # --- averages --------------------------------------------------------------------------------

    def _check_average(self, name: str, keep: Callable[[Average], float], now: State) -> None:
        """I10: the average after this generation is the one before it with this global folded in.

        Each is held against the published one before it, which was checked in its turn.
        """
        before: Average | None = getattr(now, name)
        after = self._history.average(name, now.gen)
        if after is None or after == before:
            return
        weights = self._whole(now)
        previous = self._fetch(before.ref, before.gen) if before else None
        if weights is None or (before is not None and previous is None):
            self._audit.unchecked["I10"] += 1
            return
        made = self._work / "folded"
        fold = Fold(previous, keep(before) if before else 0.0, made)
        try:
            self._averager.fold(weights, [fold])
        except (ValueError, KeyError) as error:
            self._audit.check("I10", False, f"the {name} of generation {now.gen}: {error}")
            return
        same = sha256_file(made) == after.ref
        self._audit.check("I10", same, f"the {name} of generation {now.gen} is not its globals'")

    def _ema_keep(self, before: Average) -> float:
        return self._history.config.ema_decay


def _swa_keep(before: Average) -> float:
    return before.count / (before.count + 1)
