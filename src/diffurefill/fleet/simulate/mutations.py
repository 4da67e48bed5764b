"""The fleet with one guard switched off: every guard must be missed by some seed of chaos.

A guard that no seed misses is decoration, or the simulator cannot make what it is for. Each
`Mutation` patches the product, and `hunt` looks for the first seed whose invariants are violated.
`CONTROLS` are the opposite: what saves work and must not be needed for safety.
Source: spec fleet.md 4 (mutation check).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffurefill.fleet import gates, patience, protocol, rounds, run, term
from diffurefill.fleet.collect import Collector
from diffurefill.fleet.lane import WorkerLane
from diffurefill.fleet.records import (
    GLOBAL,
    STATE,
    Contribution,
    Inspection,
    Rejected,
    Saved,
    State,
    to_json,
)
from diffurefill.fleet.run import ApplyUpdate, Run, Snapshot
from diffurefill.fleet.simulate import connection
from diffurefill.fleet.simulate.chaos import run_seed
from diffurefill.fleet.simulate.provenance import ExactAverager
from diffurefill.fleet.term import Term
from diffurefill.fleet.worker import Worker
from diffurefill.store.base import (
    MAIN,
    Change,
    Conflict,
    Publication,
    Store,
    StoreError,
    Unknown,
    Version,
    dump_json,
    new_nonce,
)


@dataclass(frozen=True)
class Mutation:
    name: str
    guard: str
    """The rule that is switched off."""
    profile: str
    """The faults under which it is missed."""
    off: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Catch:
    """The first violation of the first seed that misses the guard."""

    mutation: str
    seed: int
    invariants: tuple[str, ...]
    """All that the seed violates."""
    violation: str
    """The first."""


def hunt(mutation: Mutation, seeds: Iterable[int]) -> Catch | None:
    """The first of `seeds` in which the fleet does wrong without the guard."""
    with mutation.off():
        for seed in seeds:
            wrongs = _wrongs(mutation, seed)
            if wrongs:
                invariants = {wrong.partition(" ")[0] for wrong in wrongs}
                return Catch(
                    mutation=mutation.name,
                    seed=seed,
                    invariants=tuple(sorted(invariants)),
                    violation=wrongs[0],
                )
    return None


def harm(control: Mutation, seeds: Iterable[int]) -> list[str]:
    """What the fleet does wrong in `seeds` without a rule that is said to save work only."""
    with control.off():
        return [wrong for seed in seeds for wrong in _wrongs(control, seed)]


def _wrongs(mutation: Mutation, seed: int) -> list[str]:
    """Violations of safety. A fleet that does not get on does nothing wrong, and a crash may only
    mean that the patch does not fit the code any more."""
    violations = run_seed(seed, mutation.profile).violations
    return [v for v in violations if not v.startswith(("I20", "bug"))]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """`owner.name` is `value` meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _becomes(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    return lambda: replaced(owner, name, value)


def _says(owner: Any, name: str, answer: Any) -> Callable[[], AbstractContextManager[None]]:
    """The rule always gives the same answer."""
    return _becomes(owner, name, lambda *args, **kwargs: answer)


# --- rules ---------------------------------------------------------------------------------------


def _bases(state: State, max_staleness: int) -> list[Saved]:
    return [Saved(state.gen, state.global_weights), *state.recent[:max_staleness]]


def _base_by_generation(c: Contribution, state: State, max_staleness: int) -> bool:
    return c.base_gen in {b.gen for b in _bases(state, max_staleness)}


def _base_by_digest(c: Contribution, state: State, max_staleness: int) -> bool:
    return c.base_sha256 in {b.ref.sha256 for b in _bases(state, max_staleness)}


def _rolled_back_as(state: State, target: State) -> State:
    """A rollback under the number that the generation had before."""
    return replace(_rolled_back(state, target), gen=target.gen)


def _advanced_silently(state: State, **facts: Any) -> State:
    """A new generation without a word on what was refused for it."""
    facts["rejected"] = ()
    return _advanced(state, **facts)


def _inspect_blindly(self: Any, payload: Path, codec: str, base: Path) -> Inspection:
    found = _inspect(self, payload, codec, base)
    return replace(found, fault=None, norm=1.0) if found.fault == "nonfinite" else found


@contextlib.contextmanager
def _no_norm_gate() -> Generator[None]:
    with (
        replaced(gates, "norm_is_usual", lambda *norms: True),
        replaced(gates, "norms_stand_out", lambda norms, steps: [False] * len(norms)),
    ):
        yield


_rolled_back, _advanced = protocol.rolled_back, protocol.advanced
_inspect = ExactAverager.inspect

# --- publishes -----------------------------------------------------------------------------------


def _publish_over(self: Any, state: State, changes: dict[str, Change]) -> Iterator[float]:
    """Term.publish, overwriting whoever came first."""
    while True:
        expect = yield from self._io(self._run.store.head)
        files = {**changes, STATE: dump_json(to_json(state))}
        publication = Publication(self._run.store, MAIN, files, expect=expect)
        with contextlib.suppress(Conflict):
            self.hold((yield from self._io(publication.attempt)), state)
            return


def _push_over(self: Any, changes: dict[str, Change], expect: Version | None) -> Iterator[float]:
    """WorkerLane._publish, overwriting whoever holds the lane."""
    while True:
        publication = Publication(self._run.store, self.lane, changes, expect=expect)
        try:
            self._settle((yield from self._io(publication.attempt)))
            return
        except Conflict:
            expect = yield from self._io(lambda: self._run.store.head(self.lane))


def _landed_by_head(self: Any, doubt: StoreError) -> Version | None:
    """Publication._landed that knows no nonce: whatever moved the lane was somebody else."""
    head = self._store.head(self._lane)
    if (head and head.id) != (self._expect and self._expect.id):
        raise Conflict(f"lane {self._lane} has moved on") from doubt
    return None


def _attempt_trusting(self: Any) -> Version:
    """Publication.attempt that takes an unknown outcome for a success."""
    try:
        return _publish_once(self)
    except Unknown:
        head = self._store.head(self._lane)
        assert head is not None
        return head


def _attempt_again(self: Any) -> Version:
    """Publication.attempt that takes an unknown outcome for a failure: published once more."""
    while True:
        try:
            return _publish_once(self)
        except Unknown:
            self._expect, self.nonce = self._store.head(self._lane), new_nonce()


def _publish_once(self: Any) -> Version:
    return self._store.publish(self._lane, self._changes, expect=self._expect, nonce=self.nonce)


def _beat_and_forget(self: Any, live: int) -> Iterator[float]:
    """WorkerLane.beat that forgets a log whose publish was in doubt."""
    yield from _beat(self, live)
    self._unsettled = None


def _compact_once(store: Store, lane: str, expect: Version) -> Version:
    return store.compact(lane, expect)


_beat = WorkerLane.beat

# --- reads ---------------------------------------------------------------------------------------


def _newest_global(self: Any, now: Snapshot, apply_update: ApplyUpdate) -> Path:
    """Run.fetch_global that takes what lies under the global's name by now."""
    return self.fetch(self.store.head(MAIN).ref(GLOBAL))


def _ignore_leftovers(
    self: Any, heads: dict[str, str | None], now: Snapshot
) -> Generator[float, None, list[Rejected]]:
    """Collector.look that waits for news only."""
    if not self._seen:
        self._seen.update({lane: head for lane, head in heads.items() if head})
    return (yield from _look(self, heads, now))


def _read_alone(self: Any, head: Version | None) -> Generator[float, None, Any]:
    """WorkerLane._read of an incarnation that inherits nothing."""
    found = yield from _read(self, head)
    self.registration = replace(self.registration, inherited=None)
    return found


def _claim_at_once(self: Any) -> Iterator[float]:
    """Term.await_turn without a lease."""
    yield self._run.config.fleet.poll_seconds
    self.now = yield from self._io(self._run.snapshot)


_look, _read = Collector.look, WorkerLane._read

# --- the list ------------------------------------------------------------------------------------

MUTATIONS = (
    Mutation("base digest", "a contribution names its base by sha256", "lies",
             _becomes(protocol, "has_known_base", _base_by_generation)),
    Mutation("base generation", "a contribution names its base by generation", "rewrites",
             _becomes(protocol, "has_known_base", _base_by_digest)),
    Mutation("generation numbers", "a rollback gets a new number", "rewrites",
             _becomes(protocol, "rolled_back", _rolled_back_as)),
    Mutation("identity", "what was decided is not judged again", "network",
             _says(protocol, "was_decided", False)),
    Mutation("nonce", "a lane moved by one's own publish is recognised", "network",
             _becomes(Publication, "_landed", _landed_by_head)),
    Mutation("read-back, trusting", "an unknown outcome is not a success", "network",
             _becomes(Publication, "attempt", _attempt_trusting)),
    Mutation("read-back, repeating", "an unknown outcome is not a failure", "network",
             _becomes(Publication, "attempt", _attempt_again)),
    Mutation("unsettled log", "a log whose publish is in doubt is settled first", "network",
             _becomes(WorkerLane, "beat", _beat_and_forget)),
    Mutation("squash", "a squash of one's own is recognised", "network",
             _becomes(term, "compact_surely", _compact_once)),
    Mutation("epoch", "a merger that was overtaken stands by", "twins",
             _becomes(Term, "publish", _publish_over)),
    Mutation("incarnation, worker", "a worker whose lane was taken stops", "twins",
             _becomes(WorkerLane, "_publish", _push_over)),
    Mutation("incarnation, merger", "only the lane's holder contributes", "lies",
             _says(protocol, "holds_the_lane", True)),
    Mutation("inheritance", "what a dead worker had pushed counts", "crashes",
             _becomes(WorkerLane, "_read", _read_alone)),
    Mutation("merger first", "what lay there before the merger is merged", "crashes",
             _becomes(Collector, "look", _ignore_leftovers)),
    Mutation("hash", "bytes are what their name says", "bytes",
             _says(connection, "digest_matches", True)),
    Mutation("asking again", "a damaged answer is asked for again", "bytes",
             _becomes(patience, "MAX_CORRUPT", 1)),
    Mutation("pin", "state and weights are of one version", "network",
             _becomes(Run, "fetch_global", _newest_global)),
    Mutation("slot cursor", "rows start where the slot stands", "lies",
             _says(protocol, "starts_at_its_slot", True)),
    Mutation("cursor moves", "a slot moves with what was merged", "network",
             _becomes(protocol, "_moved", lambda cursors, accepted: dict(cursors))),
    Mutation("drift", "drift on a rolled-back push is dropped", "rewrites",
             _becomes(Worker, "_drop_drift", lambda self: None)),
    Mutation("EMA once", "a global enters the EMA once", "crashes",
             _becomes(protocol, "ema_is_due", lambda state: state.gen > 0)),
    Mutation("EMA at all", "a global that is missing from the EMA is added", "crashes",
             _says(protocol, "ema_is_due", False)),
    Mutation("lateness", "a late contribution weighs less", "network",
             _becomes(protocol, "merge_weight", lambda c, state, discount: c.tokens)),
    Mutation("finite", "numbers are finite", "vices",
             _becomes(ExactAverager, "inspect", _inspect_blindly)),
    Mutation("norm", "steps are no longer than usual", "unguarded", _no_norm_gate),
    Mutation("guard", "held-out text does not get worse", "vices",
             _says(gates, "is_worse", False)),
    Mutation("reasons", "every refusal is on record", "vices",
             _becomes(protocol, "advanced", _advanced_silently)),
    Mutation("liveness", "a worker whose log moves is waited for", "network",
             _says(rounds, "live_horizon", 1.0)),
)  # fmt: skip

CONTROLS = (
    Mutation("lease", "a merger waits for the other's lease", "twins",
             _becomes(Term, "await_turn", _claim_at_once)),
    Mutation("term look", "a merger asks whether it still holds the term", "twins",
             _becomes(Term, "require", lambda self, head_id: iter(()))),
    Mutation("old answers", "an answer older than one seen before is not used", "network",
             _says(run, "is_older", False)),
)  # fmt: skip
"""What saves work only: switched off, nothing but progress (I20) may suffer."""
