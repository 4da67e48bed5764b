"""How a test steers a running hub, in this process or another: over `/_control`."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit


class Hub:
    """`url` is what HF_ENDPOINT takes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.faults = Faults(self)

    def log(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The requests so far, oldest first.

        Each has origin, method, path, query, kind, user, authorized, fault and status; status is
        None while a request runs and where the connection was cut without an answer.
        """
        records = self.control("GET", "status")["log"]
        return [r for r in records if kind in (None, r.get("kind"))]

    def count(self, kind: str) -> int:
        return len(self.log(kind))

    def clear_log(self) -> None:
        self.control("POST", "clear-log")

    def errors(self) -> list[str]:
        """Tracebacks of the server itself; anything here is a bug of the test hub."""
        return self.control("GET", "status")["errors"]

    def configure(self, **settings: Any) -> None:
        """part_bytes, lfs_bytes, commits_per_hour (`state.Settings`)."""
        self.control("POST", "settings", settings)

    def advance_clock(self, seconds: float) -> None:
        """Dates and the hourly commit quota follow the hub's clock."""
        self.control("POST", "clock", {"advance": seconds})

    def forget_object(self, sha256: str) -> None:
        """Lose a stored content: its downloads are 404 and commits naming it are refused."""
        self.control("POST", "forget-object", {"sha256": sha256})

    def control(self, method: str, what: str, payload: Any = None) -> Any:
        """Raises ValueError with the server's words when it refuses."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        try:
            body = None if payload is None else json.dumps(payload)
            connection.request(method, f"/_control/{what}", body=body)
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(answer["error"])
        return answer


class Faults:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def add(
        self,
        kind: str,
        action: str,
        *,
        times: int | None = 1,
        skip: int = 0,
        match: str = "",
        status: int = 500,
        seconds: int = 1,
    ) -> None:
        """Make the next `times` requests of `kind` go wrong (None: until cleared).

        `kind` "any" is every request. `skip` lets that many pass first; `match` is a regular
        expression the raw path must contain; `status` is for error and error_after, `seconds` for
        rate_limited. Earlier faults are asked first. Raises ValueError on an unknown kind or
        action.
        """
        fault = {"kind": kind, "action": action, "times": times, "skip": skip}
        fault |= {"match": match, "status": status, "seconds": seconds}
        self._hub.control("POST", "faults", fault)

    def clear(self, kind: str | None = None) -> None:
        """Forget faults, of `kind` or all, and let go what hangs."""
        self._hub.control("POST", "clear", {"kind": kind})

    def active(self) -> list[dict[str, Any]]:
        return self._hub.control("GET", "status")["faults"]
