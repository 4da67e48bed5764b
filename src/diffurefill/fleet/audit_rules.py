"""The audit's rules on versions and generations, by their records. Source: spec fleet.md 4."""

from __future__ import annotations

import itertools
from dataclasses import replace

from diffurefill.fleet import protocol, records
from diffurefill.fleet.audit_findings import Audit
from diffurefill.fleet.audit_history import Entry, History
from diffurefill.fleet.records import Average, Contribution, Decided, Saved, State

ABOUT_THE_TERM = ("epoch", "merger_id", "beat", "live", "alert", "compacted_gen")
FOLLOWING = ("ema", "swa", "snapshots", "full_gen", "rejected", "roster")
"""What may change while a generation is the newest; nothing else of its state may."""
FIXED_FILES = (records.CONFIG, records.TOKENIZER, records.PROBE)


def check_records(history: History, audit: Audit) -> None:
    """Every publish, version and generation against those before it."""
    audit.generations = history.newest.gen
    for before, after in itertools.pairwise(history.entries):
        _check_publish(before, after, audit)
    _check_terms(history, audit)
    for entry in history.entries:
        _check_version(entry, history, audit)
    for gen in history.first:
        if gen > 0 and gen - 1 in history.first:
            _Generation(history, gen, audit).check()


# --- one publish after another -------------------------------------------------------------------


def _check_publish(before: Entry, after: Entry, audit: Audit) -> None:
    """I1, I7, I14: what may become of the newest version. `apart`: versions lost in between."""
    apart, at = after.index - before.index, f"version {after.version.id}"
    old, new = before.state, after.state
    grown, raised = new.gen - old.gen, new.epoch - old.epoch
    audit.check("I1", 0 <= grown <= apart, f"{at}: generation {old.gen} -> {new.gen}")
    if apart == 1:
        allowed = _may_follow(old, new)
        what = f"{at}: epoch {old.epoch} of {old.merger_id[:8] or 'nobody'} -> {new.epoch} of "
        audit.check("I7", allowed, what + (new.merger_id[:8] or "nobody"))
    else:
        audit.check("I7", 0 <= raised <= apart, f"{at}: epoch {old.epoch} -> {new.epoch}")
    forward = old.compacted_gen <= new.compacted_gen <= new.gen
    audit.check("I14", forward, f"{at}: compacted up to {new.compacted_gen}")


def _may_follow(old: State, new: State) -> bool:
    """I7: within an epoch only its holder publishes, up to giving it up; a new epoch is one more,
    begun by a claim or by a rollback."""
    if new.epoch == old.epoch:
        return bool(old.merger_id) and new.merger_id in (old.merger_id, "")
    if new.epoch != old.epoch + 1:
        return False
    if new.gen == old.gen:
        return bool(new.merger_id) and new.merger_id != old.merger_id
    return new.restored_from is not None and not new.merger_id


def _check_terms(history: History, audit: Audit) -> None:
    owners: dict[int, str] = {}
    states = [*(e.state for e in history.entries), *history.first.values()]
    for state in states:
        if state.merger_id:
            owner = owners.setdefault(state.epoch, state.merger_id)
            what = f"epoch {state.epoch} has two mergers, {owner[:8]} and {state.merger_id[:8]}"
            audit.check("I7", owner == state.merger_id, what)
    for (_, old), (gen, new) in itertools.pairwise(history.first.items()):
        audit.check("I7", new.epoch >= old.epoch, f"generation {gen}: the epoch fell")


# --- one version ---------------------------------------------------------------------------------


def _check_version(entry: Entry, history: History, audit: Audit) -> None:
    state, files, at = entry.state, entry.version.files, f"version {entry.version.id}"
    first, whole = history.first.get(state.gen), history.first.get(state.full_gen)
    if first is not None:
        same = state.global_weights == first.global_weights
        audit.check("I2", same, f"{at}: generation {state.gen} has two sets of weights")
        changed = _changed(first, state)
        told = f"{at} tells another story of generation {state.gen} than its record"
        audit.check("I16", not changed, f"{told} ({', '.join(changed)})")
    if whole is not None and state.full_gen != state.gen:
        behind = state.full_gen == state.gen - 1 and state.update is not None
        audit.check("I6", behind, f"{at}: its whole global is of generation {state.full_gen}")
    weights = state.global_weights if state.full_gen == state.gen or whole is None else None
    expected = {
        records.GLOBAL: weights or (whole.global_weights if whole else None),
        records.EMA: state.ema and state.ema.ref,
        records.SWA: state.swa and state.swa.ref,
        records.MOMENTUM: state.momentum and state.momentum.ref,
        records.UPDATE: state.update,
        **{records.snapshot_path(s.gen): s.ref for s in state.snapshots},
        **{path: history.head.files.get(path) for path in FIXED_FILES},
    }
    for path in {*expected, *(p for p in files if p.startswith("snap/"))}:
        agree = files.get(path) == expected.get(path)
        audit.check("I6", agree, f"{at}: {path} is not the file that its state names")
    for path in files:
        if path.startswith(records.ROUNDS):
            same = files[path] == history.head.files.get(path)
            audit.check("I16", same, f"{at}: {path} was another one")
    for saved in state.snapshots:
        known = history.first.get(saved.gen)
        if known is not None:
            same = saved.ref == known.global_weights
            audit.check("I2", same, f"{at}: the snapshot of {saved.gen} has other weights")


def _changed(first: State, state: State) -> list[str]:
    """What differs between two versions of a generation, though it may not."""
    one, other = records.to_json(first), records.to_json(state)
    may_change = (*ABOUT_THE_TERM, *FOLLOWING, "global_weights")
    return [name for name in one if name not in may_change and one[name] != other[name]]


# --- one generation ------------------------------------------------------------------------------


class _Generation:
    """Generation `gen` held against the one it was made from."""

    def __init__(self, history: History, gen: int, audit: Audit) -> None:
        self._history, self._gen, self._audit = history, gen, audit
        self._now = history.first[gen]

    def _check(self, invariant: str, holds: bool, what: str) -> bool:
        return self._audit.check(invariant, holds, f"generation {self._gen}: {what}")

    def check(self) -> None:
        now, gen = self._now, self._gen
        self._check("I1", now.gen == gen, f"its record is of generation {now.gen}")
        expected = gen - 1 if now.restored_from is None else now.restored_from
        parent = self._history.first.get(expected)
        named = now.parent_gen == expected < gen and parent is not None
        if not self._check("I5", named, f"it names {now.parent_gen} as its parent"):
            return
        assert parent is not None
        names = ("run_id", "config_sha", "schema_sha", "corpus_sha")
        same = all(getattr(now, n) == getattr(parent, n) for n in names)
        self._check("I8", same, "it names another run, configuration, schema or corpus")
        if now.restored_from is None:
            self._check_merged(parent)
        else:
            self._check_restored(parent)
        for name in ("ema", "swa"):
            self._check_average(name, parent)

    def _check_merged(self, parent: State) -> None:
        now, accepted = self._now, self._now.accepted
        base = self._history.bases.get(self._gen, parent.global_weights)
        self._check("I5", base == parent.global_weights, "its record names other base weights")
        self._check("I9", bool(accepted), "nothing was merged")
        kept = self._history.config.max_staleness
        recent = (Saved(parent.gen, parent.global_weights), *parent.recent)[:kept]
        self._check("I5", now.recent == recent, "its recent generations are not its ancestors")
        for c in accepted:
            self._check_contribution(c, parent)
        once = len({c.worker for c in accepted}) == len(accepted)
        self._check("I11", once, "a slot was read twice for it")
        ends = {str(c.worker): c.cursor_end for c in accepted if c.cursor_end is not None}
        moved = now.cursors == {**parent.cursors, **ends}
        self._check("I11", moved, "the slots' cursors do not follow its contributions")
        steps = max((c.steps for c in accepted), default=0)
        self._check("I12", now.step == parent.step + steps, "its step does not add up")
        tokens = parent.tokens + sum(c.tokens for c in accepted)
        self._check("I16", now.tokens == tokens, "its tokens do not add up")
        measured = len(now.measured) == len(accepted)
        self._check("I16", measured, "its measurements are not of its contributions")

    def _check_contribution(self, c: Contribution, parent: State) -> None:
        who = f"worker {c.worker}, contribution {c.seq}"
        late = self._history.config.max_staleness
        known = protocol.has_known_base(c, parent, late)
        self._check("I3", known, f"{who} was made on generation {c.base_gen} or other weights")
        lane = self._history.lanes.get(c.worker)
        pushed = lane.pushed.get(c.identity) if lane else None
        if pushed is None and lane is not None and c.base_gen < lane.compacted_gen:
            self._audit.unchecked["I5"] += 1
        else:
            self._check("I5", c in (pushed or ()), f"{who} is not what its worker pushed")
        starts = protocol.starts_at_its_slot(c, parent)
        self._check("I11", starts, f"{who} does not start where its slot stands")
        decided = Decided(incarnation=c.incarnation, seq=c.seq)
        told = self._now.roster.get(str(c.worker)) == decided
        self._check("I16", told, f"{who} is not on the roster")

    def _check_restored(self, target: State) -> None:
        now = self._now
        same = now.global_weights == target.global_weights
        self._check("I5", same, f"its weights are not those of {target.gen}, which it restores")
        empty = not (now.accepted or now.rejected or now.measured or now.recent or now.update)
        self._check("I5", empty, "a rollback brings in something new")
        self._check("I12", now.step == target.step, f"its step is not that of {target.gen}")
        self._check("I11", now.cursors == target.cursors, "its cursors are not its target's")
        self._check("I16", now.tokens == target.tokens, "its tokens are not its target's")
        momentum = target.momentum and Saved(self._gen, target.momentum.ref)
        kept = now.momentum in (momentum, None)  # None: it could not be read then, and starts anew
        self._check("I5", kept, "its momentum is not its target's")

    # --- EMA and SWA -----------------------------------------------------------------------------

    def _check_average(self, name: str, parent: State) -> None:
        """I10: which generations an average holds; its bytes are audit_weights.py's."""
        start: Average | None = getattr(self._now, name)
        self._check("I10", self._began_as(name, parent, start), f"its {name} began as another one")
        end = self._history.average(name, self._gen)
        if end == start:
            due = self._history.follows(self._gen) and self.is_due(name)
            self._check("I10", not due, f"it is missing from the {name}")
            return
        count = start.count + 1 if start else 1
        folded = end is not None and (end.gen, end.count) == (self._gen, count)
        self._check("I10", folded and self.is_due(name), f"its {name} counts others than itself")

    def _began_as(self, name: str, parent: State, start: Average | None) -> bool:
        if self._now.restored_from is None:
            last = self._history.last(parent.gen) if self._history.has_all(parent.gen) else None
            return last is None or getattr(last, name) == start
        if start is None:  # it could not be read then, and starts anew
            return True
        before = self._history.first[self._gen - 1]
        targets = [parent, *(e.state for e in self._history.entries if e.state.gen == parent.gen)]
        if self._history.follows(parent.gen):  # what the target ended with, by what followed it
            ended = self._history.average(name, parent.gen)
            ema = name == "ema"
            targets.append(replace(parent, ema=ended) if ema else replace(parent, swa=ended))
        if any(start == getattr(protocol.rolled_back(before, t), name) for t in targets):
            return True
        # The version that told of the target's own fold may have been deleted or damaged.
        earlier: Average | None = getattr(parent, name)
        count = earlier.count + 1 if earlier else 1
        ended = start is not None and (start.gen, start.count) == (self._gen, count)
        return ended and not self._history.has_all(parent.gen)

    def is_due(self, name: str) -> bool:
        if name == "ema":
            return protocol.ema_is_due(self._now)
        return protocol.swa_is_due(self._now, self._history.config)
