"""What a test may make go wrong: by kind of request, for the next N of them or until cleared.

Source: spec hf-endpoints.md 7 and hub.md A8.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tests.hub_server.http import HubError

BEFORE = {
    "error": "answer `status` without doing anything",
    "locked": "409: another commit is in progress",
    "conflict": "412, whatever the parent is",
    "rate_limited": "429 with r=0: come back in `seconds`",
    "hourly_limit": "429 of the hourly commit quota, where r is not 0",
    "unauthorized": "401: the token is not valid",
    "forbidden": "403: the token may not do this",
    "storage_full": "403: the storage limit is reached",
    "drop": "cut the connection before doing anything",
    "hang": "never answer; the connection is cut once faults are cleared",
}
AFTER = {
    "error_after": "do it, then answer `status`",
    "drop_after": "do it, then cut the connection",
    "hang_after": "do it, then as hang",
}
INSIDE = {
    "stale": "a branch or list of refs as it was before its last move",
    "flip": "one byte of the content is wrong, the length right",
    "truncate": "the stored content is shorter than it should be",
    "cut": "the connection is cut half-way through the content",
    "stall": "the content stops half-way; cut once faults are cleared",
    "object_error": "the LFS batch answers 200 with an error for every object",
}
READS = ("info", "refs", "commits", "tree", "paths_info", "resolve")
ONLY_FOR = {
    "stale": READS,
    "flip": ("blob", "resolve"),
    "truncate": ("blob",),
    "cut": ("blob",),
    "stall": ("blob",),
    "object_error": ("batch",),
}
"""The kinds whose handlers act out a fault of INSIDE; for others it would do nothing."""
ACTIONS = {**BEFORE, **AFTER, **INSIDE}


@dataclass
class Fault:
    """`times`: how many requests it hits, None until cleared. `skip`: how many pass first.

    `kind` is a route's name or "any"; `match` a regular expression searched in the raw path.
    """

    kind: str
    action: str
    times: int | None = 1
    skip: int = 0
    match: str = ""
    status: int = 500
    seconds: int = 1

    def hits(self, kind: str, path: str) -> bool:
        able = kind in ONLY_FOR.get(self.action, (kind,))
        return able and self.kind in ("any", kind) and re.search(self.match, path) is not None


class Faults:
    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = {"any", *kinds}
        self._lock = threading.Lock()
        self._active: list[Fault] = []
        self.cleared = 0

    def add(self, fault: Fault) -> None:
        """Raises ValueError on a kind or action that nothing would ever act out."""
        if fault.kind not in self._kinds:
            raise ValueError(f"no requests of kind {fault.kind!r}; known: {sorted(self._kinds)}")
        if fault.action not in ACTIONS:
            raise ValueError(f"no fault {fault.action!r}; known: {sorted(ACTIONS)}")
        if fault.kind not in ("any", *ONLY_FOR.get(fault.action, (fault.kind,))):
            raise ValueError(f"{fault.action!r} is for {ONLY_FOR[fault.action]}")
        with self._lock:
            self._active.append(fault)

    def take(self, kind: str, path: str) -> Fault | None:
        """The first fault that hits this request, counted as used."""
        with self._lock:
            for fault in self._active:
                if not fault.hits(kind, path):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self._active.remove(fault)
                return fault
        return None

    def clear(self, kind: str | None = None) -> None:
        """Forget the faults of `kind` (all when None) and let go every request that hangs."""
        with self._lock:
            self._active = [f for f in self._active if kind is not None and f.kind != kind]
            self.cleared += 1

    def listed(self) -> list[dict[str, Any]]:
        with self._lock:
            return [asdict(f) for f in self._active]


def refusal(fault: Fault) -> HubError | None:
    """The error answer that a fault of BEFORE or AFTER stands for; None when it is no answer."""
    match fault.action:
        case "error" | "error_after":
            return HubError(fault.status, "Internal Error - We're working hard to fix this.")
        case "locked":
            return HubError(
                409,
                "Another commit operation is in progress for this repository. "
                "Please try again later.",
            )
        case "conflict":
            return commit_conflict()
        case "rate_limited":
            limit = {"RateLimit": f'"api";r=0;t={fault.seconds}'}
            return HubError(429, "We had to rate limit your IP.", headers=limit)
        case "hourly_limit":
            return hourly_limit(128)
        case "unauthorized":
            return HubError(401, "Invalid credentials in Authorization header")
        case "forbidden":
            return forbidden()
        case "storage_full":
            return HubError(403, "Storage limit reached, delete files or upgrade your plan.")
    return None


def commit_conflict() -> HubError:
    return HubError(412, "A commit has happened since. Please refresh and try again.")


def hourly_limit(quota: int) -> HubError:
    return HubError(
        429,
        f"You have exceeded the rate limit for repository commits ({quota} per hour). "
        "Retry this action in about 1 hour.",
    )


def forbidden() -> HubError:
    return HubError(403, "You don't have the rights to write here: this token is read-only.")
