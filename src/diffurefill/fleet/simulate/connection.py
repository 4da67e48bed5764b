"""One process's connection to the hub, where everything that can go wrong does.

Whether a fault befalls an operation is the `Plan`'s to say; how it shows is written here. Every
operation costs virtual time: a latency, and for weights their bytes over the bandwidth.
Source: spec fleet.md 3 and 4 (fault model).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.kernel import Costs, Killed, Process
from diffurefill.store.base import (
    MAIN,
    Busy,
    Change,
    Conflict,
    Corrupt,
    Denied,
    Ref,
    StoreError,
    Unknown,
    Version,
    check_lane,
    new_nonce,
)

T = TypeVar("T")

FAULTS: dict[str, tuple[str, ...]] = {
    "publish": (
        "busy", "quota", "lost_request", "lost_answer", "late", "doubled", "slow",
        "kill_before", "kill_after",
    ),
    "compact": ("busy", "lost_answer", "kill_before", "kill_after"),
    "stage": ("busy", "slow", "damaged", "kill_before", "kill_after"),
    "fetch": ("busy", "slow", "flip", "truncate", "flip_twice", "disk_full", "kill_before",
              "kill_after"),
    "read": ("busy", "flip", "truncate", "flip_twice"),
    "head": ("busy", "stale", "back"),
    "poll": ("busy", "stale", "back"),
    "lanes": ("busy", "stale"),
    "lookup": ("busy", "stale"),
    "selftest": ("busy",),
    "check_access": ("busy",),
}  # fmt: skip
"""What may befall each operation. `down`, `full` and `revoked` come from windows of time."""

WRITES = ("publish", "compact", "stage", "check_access", "selftest")


class Plan(Protocol):
    """Who suffers what. Called once per operation."""

    def fault(self, process: Process, op: str, lane: str) -> str | None:
        """The fault that befalls this operation, or None."""
        ...

    def seconds(self, kind: str) -> float:
        """How long a `late` publish is under way, a `slow` transfer hangs, a head lags."""
        ...


class SimStore:
    """The Store contract as one process sees it."""

    def __init__(self, hub: SimHub, process: Process, plan: Plan, costs: Costs) -> None:
        self.uri = hub.uri
        self.hub, self.process, self.plan, self.costs = hub, process, plan, costs
        self._floor: dict[str, int] = {}
        """The newest version seen of each lane: a lagging head never goes behind it."""

    # --- one operation ---------------------------------------------------------------------------

    def _operate(self, op: str, lane: str, effect: Callable[[str | None], T]) -> T:
        """Do `effect(fault)` unless the fault forbids it; notes what came of it."""
        process = self.process
        if not process.alive:
            raise Killed
        process.spend(self.costs.latency_seconds * process.kernel.chance.uniform(0.5, 1.5))
        fault = self.plan.fault(process, op, lane)
        note = process.kernel.note
        try:
            self._fail_before(fault, op)
            result = effect(fault)
        except StoreError as error:
            note(process.name, op, lane, fault or "", type(error).__name__)
            raise
        note(process.name, op, lane, fault or "", _told(result))
        if fault == "kill_after":
            raise Killed
        if fault == "lost_answer":
            raise _unanswered(op)
        return result

    def _fail_before(self, fault: str | None, op: str) -> None:
        if fault is None:
            return
        if fault == "kill_before":
            raise Killed
        if fault in ("busy", "down"):
            raise Busy("503", 5.0)
        if fault == "quota":
            raise Busy("429: rate limited", 30.0)
        if fault == "lost_request":
            raise Unknown("the connection broke before an answer came")
        if fault == "revoked" or (fault == "full" and op in WRITES):
            raise Denied(f"403: {fault}")
        if fault == "disk_full":
            raise Denied("no space left on this machine")
        if fault == "slow":
            self.process.spend(self.plan.seconds("slow"))

    # --- versions --------------------------------------------------------------------------------

    def selftest(self) -> None:
        self._operate("selftest", "", lambda fault: None)

    def check_access(self) -> None:
        self._operate("check_access", "", lambda fault: None)

    def lanes(self) -> list[str]:
        def effect(fault: str | None) -> list[str]:
            return [lane for lane in self.hub.lanes() if self._visible(lane, fault)]

        return self._operate("lanes", "", effect)

    def head(self, lane: str = MAIN) -> Version | None:
        return self._operate("head", lane, lambda fault: self._look(lane, fault))

    def poll(self, lanes: list[str]) -> dict[str, str | None]:
        def effect(fault: str | None) -> dict[str, str | None]:
            heads = {lane: self._look(lane, fault) for lane in lanes}
            return {lane: head.id if head else None for lane, head in heads.items()}

        return self._operate("poll", ",".join(lanes), effect)

    def lookup(self, lane: str, nonce: str) -> Version | None:
        def effect(fault: str | None) -> Version | None:
            versions = self._visible(lane, fault)
            found = next((v for v in reversed(versions) if v.nonce == nonce), None)
            if found is not None:
                self._saw(found)
            return found

        return self._operate("lookup", lane, effect)

    def history(self, lane: str) -> Iterator[Version]:
        return self._operate("head", lane, lambda fault: iter(list(self.hub.history(lane))))

    def publish(
        self,
        lane: str,
        changes: Mapping[str, Change],
        *,
        expect: Version | None,
        nonce: str | None = None,
    ) -> Version:
        nonce, hub, writer = nonce or new_nonce(), self.hub, self.process.name

        def land() -> Version:
            return hub.publish(lane, changes, expect=expect, nonce=nonce, writer=writer)

        def effect(fault: str | None) -> Version:
            if fault == "late":
                self._land_later(lane, land)
                raise Unknown("no answer in time")
            version = land()
            if fault == "doubled":  # sent again below us: the second one conflicts with the first
                raise Conflict(f"412: lane {lane} has moved")
            self._saw(version)
            return version

        return self._operate("publish", lane, effect)

    def compact(self, lane: str, expect: Version) -> Version:
        def effect(fault: str | None) -> Version:
            version = self.hub.compact(lane, expect)
            self._saw(version)
            return version

        return self._operate("compact", lane, effect)

    def _land_later(self, lane: str, land: Callable[[], Version]) -> None:
        """The publish reaches the hub long after its sender stopped waiting, or even died."""
        kernel = self.process.kernel

        def arrive() -> None:
            try:
                outcome = f"landed {land().id}"
            except StoreError as error:
                outcome = type(error).__name__
            kernel.note(self.process.name, "late publish", lane, outcome)

        kernel.at(kernel.now + self.plan.seconds("late"), arrive)

    # --- heads that lag --------------------------------------------------------------------------

    def _look(self, lane: str, fault: str | None) -> Version | None:
        versions = self._visible(lane, fault)
        seen = self.hub.seen_by.setdefault(self.process.name, {})
        if not versions:
            seen.pop(lane, None)  # a lagging answer may deny a lane that was told before
            return None
        if fault != "back":
            self._saw(versions[-1])
        if seen.get(lane, ("", 0.0))[0] != versions[-1].id:
            at = self.process.kernel.now + self.process.spent
            seen[lane] = (versions[-1].id, at)
        return versions[-1]

    def _visible(self, lane: str, fault: str | None) -> list[Version]:
        """The lane's versions as an answer shows them: a lagging one hides the newest.

        A `back` answer hides even what this process has seen before.
        """
        check_lane(lane)
        versions = self.hub.lanes_kept.get(lane, [])
        if fault not in ("stale", "back"):
            return versions
        known = [*self.hub.dropped.get(lane, []), *versions]
        horizon = self.hub.clock() - self.plan.seconds("lag")
        floor = self._floor.get(lane, 0) if fault == "stale" else 0
        hidden = 0
        for version in reversed(known):
            young = self.hub.published_at[lane, version.id] > horizon
            if not young or int(version.id) <= floor:
                break
            hidden += 1
        hidden = self.process.kernel.chance.randint(0, hidden)
        return known[: len(known) - hidden] if hidden else versions

    def _saw(self, version: Version) -> None:
        self._floor[version.lane] = max(self._floor.get(version.lane, 0), int(version.id))

    # --- bytes -----------------------------------------------------------------------------------

    def stage(self, source: Path) -> Ref:
        def effect(fault: str | None) -> Ref:
            content = source.read_bytes()
            self.process.spend(self.costs.bytes_of(content) / self.costs.upload_bytes_per_second)
            ref = self.hub.put(content)
            if fault == "damaged":
                self.hub.damaged[ref.sha256] = flipped(content)
            return ref

        return self._operate("stage", "", effect)

    def read(self, ref: Ref) -> bytes:
        return self._operate("read", "", lambda fault: self._get(ref, fault))

    def fetch(self, ref: Ref, dest: Path) -> Path:
        def effect(fault: str | None) -> Path:
            content = self._get(ref, fault)
            self.hub.fetched_by.setdefault(self.process.name, set()).add(ref.sha256)
            self.process.spend(self.costs.bytes_of(content) / self.costs.download_bytes_per_second)
            dest.parent.mkdir(parents=True, exist_ok=True)
            dest.write_bytes(content)
            return dest

        return self._operate("fetch", "", effect)

    def _get(self, ref: Ref, fault: str | None) -> bytes:
        """The bytes, asked for twice at most, as every real store does."""
        for attempt in range(2):
            content = self.hub.answer(ref)
            if fault == "flip_twice" or (fault == "flip" and attempt == 0):
                content = flipped(content)
            if fault == "truncate" and attempt == 0:
                content = content[: len(content) // 2]
            if digest_matches(content, ref):
                return content
        raise Corrupt(f"blob {ref.sha256}: its bytes are not what its name says")


def _unanswered(op: str) -> StoreError:
    """What a store says when a write landed and the answer was lost: only a publish may be Unknown,
    a squash is looked at again."""
    if op == "publish":
        return Unknown("500, after the commit had landed")
    return Busy("500, after the lane was squashed", 5.0)


def digest_matches(content: bytes, ref: Ref) -> bool:
    """The check that every backend makes of every byte it hands out."""
    return len(content) == ref.size and hashlib.sha256(content).hexdigest() == ref.sha256


def flipped(content: bytes) -> bytes:
    """The same size, one digit changed: JSON that parses and says something else."""
    for place in range(len(content) // 2, len(content)):
        if content[place : place + 1].isdigit():
            digit = (content[place] - 48 + 1) % 10 + 48
            return content[:place] + bytes([digit]) + content[place + 1 :]
    return bytes([content[0] ^ 1]) + content[1:] if content else b"\0"


def _told(result: Any) -> str:
    """What the trace says of an answer: version ids, never nonces or digests."""
    if isinstance(result, Version):
        return result.id
    if isinstance(result, dict):
        return ",".join(str(head) for head in result.values())
    if isinstance(result, list):
        return ",".join(result)
    return ""
