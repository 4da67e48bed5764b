"""Reading a run's whole history for the audit: versions, round records, what lanes ever held.

Compaction deletes what only older versions named. Then `rounds/<gen>.json`, which stay for ever,
tell what every generation was made of, and a file that is gone is no fault where the run says that
it may be: before the last version of generation `compacted_gen`. Source: spec fleet.md 4, 5.2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from diffurefill.config import FleetConfig, UserError
from diffurefill.fleet import records
from diffurefill.fleet.audit_findings import Audit
from diffurefill.fleet.patience import FIRST_PAUSE, LONGEST_PAUSE
from diffurefill.fleet.records import Average, Contribution, Identity, State
from diffurefill.fleet.run import read_config
from diffurefill.store.base import (
    MAIN,
    Busy,
    Corrupt,
    NotFound,
    Ref,
    Store,
    StoreError,
    Version,
    read_json,
)

T = TypeVar("T")

UNREADABLE = (StoreError, UserError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Entry:
    """A version of the main lane, by its place in the history."""

    index: int
    version: Version
    state: State


@dataclass
class Lane:
    """What a worker's lane held, as far as it is kept."""

    compacted_gen: int = 0
    """Payloads made on generations before this one may be gone."""
    versions: list[Version] = field(default_factory=list)
    boundary: int = 0
    """Files that only versions before this place name may be gone."""
    pushed: dict[Identity, list[Contribution]] = field(default_factory=dict)
    at: dict[str, Contribution] = field(default_factory=dict)
    """What lay there, by the version's nonce."""
    log: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class History:
    config: FleetConfig
    head: Version
    versions: list[Version]
    """Of the main lane, oldest first."""
    entries: list[Entry]
    """Those of them whose state can be read."""
    boundary: int
    """Files that only versions before this place name may be gone."""
    first: dict[int, State]
    """Every generation as it was published first."""
    bases: dict[int, Ref]
    """The weights that a generation's contributions were added to, by its record."""
    lanes: dict[int, Lane]

    @property
    def newest(self) -> State:
        return self.entries[-1].state

    @property
    def compacted_gen(self) -> int:
        return self.newest.compacted_gen

    def last(self, gen: int) -> State | None:
        """The last version of generation `gen` that can be read."""
        return next((e.state for e in reversed(self.entries) if e.state.gen == gen), None)

    def has_all(self, gen: int) -> bool:
        """Whether every version of generation `gen` can be read."""
        around = [e.index for e in self.entries if abs(e.state.gen - gen) <= 1]
        own = [e.index for e in self.entries if e.state.gen == gen]
        if not own:
            return False
        ends = {own[0] - 1, own[-1] + 1} - {-1, len(self.versions)}
        whole = own[-1] - own[0] == len(own) - 1 and ends <= set(around)
        return whole and (own[0] > 0 or gen == 0)

    def follows(self, gen: int) -> bool:
        """Whether the next generation was merged into this one, and not a rollback."""
        after = self.first.get(gen + 1)
        return after is not None and after.restored_from is None

    def average(self, name: str, gen: int) -> Average | None:
        """The EMA or SWA (`name`) when generation `gen` was left."""
        if self.follows(gen):
            return getattr(self.first[gen + 1], name)
        state = self.last(gen) or self.first.get(gen)
        return getattr(state, name) if state else None


class Reader:
    """Reads and fetches with every failure on the audit's record; nothing is verified twice."""

    def __init__(self, store: Store, work: Path, audit: Audit) -> None:
        self.store, self.work, self.audit = store, work, audit
        self.kept: set[Ref] = set()
        """What a compaction had to keep."""
        self.excused: set[Ref] = set()
        """What was refused because it is damaged: that it is shows that the reason was true."""
        self._seen: dict[Ref, bool] = {}

    def read(
        self,
        read: Callable[[], T],
        *,
        may_be_gone: bool = False,
        excused: bool = False,
        invariant: str = "files",
    ) -> T | None:
        """What `read` returns; None, and a violation, when it is unsound."""
        try:
            found = insist(read)
        except (NotFound, Corrupt) as error:
            gone = isinstance(error, NotFound)
            if excused:
                self.audit.check("I15", True, "")
            elif gone and may_be_gone:
                self.audit.unchecked[invariant] += 1
            else:
                self.audit.check(invariant if gone else "files", False, str(error))
            return None
        except UNREADABLE as error:
            self.audit.check(invariant, False, str(error))
            return None
        self.audit.check(invariant, True, "")
        return found

    def json(
        self, version: Version, path: str, parse: Callable[[dict[str, Any]], T], may_be_gone: bool
    ) -> T | None:
        """The parsed record at `path` of `version`."""
        ref = version.files.get(path)
        if ref is not None and self._seen.get(ref) is False:
            return None

        def record() -> T:
            content = read_json(self.store, version, path)
            try:
                return parse(content)
            except (KeyError, TypeError) as error:
                at = f"{version.lane}@{version.id}: {path}"
                raise Corrupt(
                    f"{at} is not what this version of diffurefill writes ({error})"
                ) from None

        found = self.read(record, may_be_gone=may_be_gone)
        if ref is not None:
            self._seen[ref] = found is not None
        return found

    def fetch(self, ref: Ref, *, may_be_gone: bool) -> Path | None:
        """A verified local copy, until `forget`."""
        path = self.work / ref.sha256
        if path.exists():
            return path
        if self._seen.get(ref) is False:
            return None
        found = self.read(
            lambda: self.store.fetch(ref, path),
            may_be_gone=may_be_gone and ref not in self.kept,
            excused=ref in self.excused,
            invariant="I14" if ref in self.kept else "files",
        )
        self._seen[ref] = found is not None
        return found

    def forget(self, *keep: Ref) -> None:
        names = {ref.sha256 for ref in keep}
        for path in self.work.iterdir():
            if path.name not in names:
                path.unlink()

    def verify_rest(self, versions: list[Version], boundary: int) -> None:
        """Every file that was not looked at yet; newest first, for what may be gone comes last."""
        for index in reversed(range(len(versions))):
            for ref in versions[index].files.values():
                if ref not in self._seen and self.fetch(ref, may_be_gone=index < boundary):
                    self.forget()

    def history(self, lane: str) -> list[Version]:
        return self.read(lambda: list(self.store.history(lane))) or []


def insist(read: Callable[[], T]) -> T:
    """Wait for as long as the store is busy: that it is says nothing of what it holds."""
    pause = FIRST_PAUSE
    while True:
        try:
            return read()
        except Busy as busy:
            time.sleep(max(busy.retry_after, pause))
            pause = min(2.0 * pause, LONGEST_PAUSE)


def read_history(reader: Reader, head: Version) -> History | None:
    """None when no state at all can be read; the audit says so."""
    config = reader.read(lambda: read_config(reader.store, head))
    versions = reader.history(MAIN)
    reader.audit.versions = len(versions)
    entries, boundary = _entries(reader, versions)
    if config is None or not entries:
        return None
    if entries[-1].state.compacted_gen:
        reader.kept = set(head.files.values())
    first, bases = _records(reader, head, entries)
    lanes = {}
    for lane in reader.store.lanes():
        worker = records.worker_of(lane)
        if worker is not None:
            lanes[worker] = _lane(reader, lane, worker)
    return History(config.fleet, head, versions, entries, boundary, first, bases, lanes)


def _entries(reader: Reader, versions: list[Version]) -> tuple[list[Entry], int]:
    """The readable versions, and the last place before which a compaction may have deleted: that
    of the last version of the generation that was compacted."""
    found: list[Entry] = []
    compacted = last = 0
    for index in reversed(range(len(versions))):
        state = reader.json(
            versions[index],
            records.STATE,
            records.state_from_json,
            may_be_gone=index < last,
        )
        if state is None:
            continue
        if not found:
            compacted = state.compacted_gen
        if last == 0 and compacted > 0 and state.gen <= compacted:
            last = index
        found.append(Entry(index, versions[index], state))
    return found[::-1], last


def _records(
    reader: Reader, head: Version, entries: list[Entry]
) -> tuple[dict[int, State], dict[int, Ref]]:
    """Every generation's first state and base, from the records in the head's tree.

    Where the older version is still there it is compared with them later; it stands in for a
    record that cannot be read, and for generation 0, which has none.
    """
    first: dict[int, State] = {}
    for entry in entries:
        first.setdefault(entry.state.gen, entry.state)
    bases: dict[int, Ref] = {}
    for gen in range(1, entries[-1].state.gen + 1):
        path = records.round_path(gen)
        held = path in head.files
        reader.audit.check("I14", held, f"the record {path} is not in the newest version")
        if not held:
            continue
        record = reader.json(head, path, _parse_record, may_be_gone=False)
        if record is not None:
            bases[gen], first[gen] = record
    if 0 not in first and 1 in bases:
        first[0] = _origin(entries[-1].state, bases[1])
    return dict(sorted(first.items())), bases


def _parse_record(record: dict[str, Any]) -> tuple[Ref, State]:
    return Ref.from_json(record["base"]), records.state_from_json(record["state"])


def _origin(state: State, weights: Ref) -> State:
    """Generation 0 of a run whose history does not reach back to it."""
    return State(
        run_id=state.run_id,
        config_sha=state.config_sha,
        schema_sha=state.schema_sha,
        corpus_sha=state.corpus_sha,
        global_weights=weights,
    )


def _lane(reader: Reader, name: str, worker: int) -> Lane:
    lane, paths = Lane(versions=reader.history(name)), records.worker_paths(worker)
    if not lane.versions:
        return lane
    head = lane.versions[-1]
    newest = reader.json(head, paths.registration, records.registration_from_json, False)
    if newest is not None and newest.compacted_gen > 0:
        lane.compacted_gen = newest.compacted_gen
        lane.boundary = _first_compacted(lane, head, paths.registration, reader)
    read: dict[Ref, Contribution | None] = {}  # pushes of the log alone repeat the manifest
    for index in reversed(range(len(lane.versions))):
        version = lane.versions[index]
        ref = version.files.get(paths.manifest)
        if ref is None:
            continue
        if ref not in read:
            gone = index < lane.boundary
            c = reader.json(version, paths.manifest, records.contribution_from_json, gone)
            read[ref] = c
            if c is not None:
                lane.pushed.setdefault(c.identity, []).append(c)
        if (found := read[ref]) is not None:
            lane.at[version.nonce] = found
    if paths.log in head.files:
        lane.log = reader.read(lambda: _log(reader.store, head.ref(paths.log))) or []
    return lane


def _first_compacted(lane: Lane, head: Version, path: str, reader: Reader) -> int:
    """The place of the lane's last compaction: where its registration began to name it."""
    place = len(lane.versions) - 1
    for index in reversed(range(len(lane.versions))):
        ref = lane.versions[index].files.get(path)
        if ref != head.files[path]:
            same = reader.json(
                lane.versions[index], path, records.registration_from_json, may_be_gone=True
            )
            if same is None or same.compacted_gen != lane.compacted_gen:
                break
        place = index
    return place


def _log(store: Store, ref: Ref) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.read(ref).decode().splitlines() if line.strip()]
