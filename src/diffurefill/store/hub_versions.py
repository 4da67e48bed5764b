"""What this process knows of a hub run's versions: it never goes back behind what it has seen.

The hub may answer from a replica that lags behind a commit already acknowledged. Every manifest
carries its number in the lane, so the older answer is recognised and the newest version known is
given instead. A branch that a person sets back by hand is therefore followed only by processes
started afterwards. Source: spec fleet.md 5.4 (old head after a publish), hub.md A8.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from diffurefill.store.base import Busy, Corrupt, NotFound, Ref, check_lane
from diffurefill.store.hub_client import PASSING_PAUSE, NoFile
from diffurefill.store.hub_files import MANIFEST, Known, decode
from diffurefill.store.hub_repo import HubRepo

MAX_VERSIONS = 512
"""Manifests kept in memory; an older one is read again when it is wanted."""


class HubVersions:
    def __init__(self, repo: HubRepo) -> None:
        self._repo = repo
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Known | None] = OrderedDict()  # by commit id
        self._newest: dict[str, Known] = {}  # by lane
        self._overtaken: set[str] = set()  # commit ids that are no head any more

    def lanes(self) -> set[str]:
        """Names of all branches, and of lanes that a lagging answer leaves out."""
        return {*self._repo.branches(), *self._newest}

    def heads(self, lanes: Iterable[str]) -> dict[str, Known | None]:
        """The newest version known of each lane: one request, and one per version not seen yet."""
        lanes = list(lanes)
        for lane in lanes:
            check_lane(lane)
        for _attempt in range(2):
            branches = self._repo.branches()
            with contextlib.suppress(NotFound):  # squashed between the two requests
                return {lane: self.newest(lane, branches.get(lane)) for lane in lanes}
        raise Busy(f"{self._repo.uri}: branches move while they are read", PASSING_PAUSE)

    def newest(self, lane: str, commit: str | None) -> Known | None:
        """The newest version known of `lane`, whose branch is said to be at `commit`."""
        newest = self._newest.get(lane)
        if commit is None or commit in self._overtaken:
            return newest
        if newest is not None and newest.version.id == commit:
            return newest
        known = self.at(commit)
        # A new branch holds what it was started from until its own first version.
        return self.advance(known) if known and known.version.lane == lane else newest

    def advance(self, known: Known) -> Known:
        """Take note of a version; returns the newest of its lane."""
        with self._lock:
            version, newest = known.version, self._newest.get(known.version.lane)
            self._keep(version.id, known)
            if newest is not None and newest.version.id != version.id:
                if known.number < newest.number or version.id in self._overtaken:
                    self._overtaken.add(version.id)
                    return newest
                self._overtaken.add(newest.version.id)
            self._newest[version.lane] = known
            return known

    def at(self, commit: str) -> Known | None:
        """The version that `commit` is, or None without a manifest; both are so for good.

        Raises NotFound when there is no such commit (any more).
        """
        if commit in self._kept:
            return self._kept[commit]
        try:
            known = self._read(commit)
        except NoFile:
            known = None
        with self._lock:
            self._keep(commit, known)
        return known

    def forget(self, *, commit: str | None = None, lane: str | None = None) -> None:
        """Drop a commit that is gone, or a lane that was removed."""
        with self._lock:
            self._kept.pop(commit or "", None)
            self._newest.pop(lane or "", None)

    def places(self, ref: Ref) -> Iterator[tuple[str, str]]:
        """(commit, path) of every known file with these bytes, newest version first."""
        with self._lock:
            kept = [known for known in reversed(self._kept.values()) if known]
        for known in kept:
            for path, held in known.version.files.items():
                if held == ref:
                    yield known.version.id, path
                    break

    def _read(self, commit: str) -> Known:
        try:
            return decode(self._repo.small_file(commit, MANIFEST), commit)
        except Corrupt:
            return decode(self._repo.small_file(commit, MANIFEST), commit)

    def _keep(self, commit: str, known: Known | None) -> None:
        self._kept[commit] = known
        while len(self._kept) > MAX_VERSIONS:
            self._kept.popitem(last=False)
