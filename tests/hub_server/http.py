"""One request and one answer, over plain ASGI. Paths stay percent-encoded, as the routes need.

A branch `refs/pr/1` arrives as `refs%2Fpr%2F1`: decoding before routing would break it.
Source: spec hf-endpoints.md 0.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs


class HubError(Exception):
    """An answer that is an error. `code` is what decides the exception the client raises."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers, self.body = dict(headers or {}), dict(body or {})

    def response(self) -> Response:
        headers = {"X-Error-Message": self.message, **self.headers}
        if self.code is not None:
            headers["X-Error-Code"] = self.code
        return Response({"error": self.message, **self.body}, self.status, headers)


def repo_not_found() -> HubError:
    return HubError(404, "Repository not found", "RepoNotFound")


def revision_not_found(rev: str) -> HubError:
    return HubError(404, f"Invalid rev id: {rev}", "RevisionNotFound")


def entry_not_found(headers: Mapping[str, str] | None = None) -> HubError:
    return HubError(404, "Entry not found", "EntryNotFound", headers)


@dataclass
class Response:
    """`content` is bytes as they are, or anything else as JSON."""

    content: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> tuple[bytes, dict[str, str]]:
        if isinstance(self.content, bytes):
            return self.content, self.headers
        headers = {"Content-Type": "application/json", **self.headers}
        return json.dumps(self.content).encode(), headers


@dataclass
class Request:
    origin: str
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    receive: Any
    send: Any
    kind: str = "unknown"
    user: str | None = None
    fault: str | None = None
    """Name of a fault that the handler itself must act out."""

    @classmethod
    def from_scope(cls, origin: str, scope: Mapping[str, Any], receive: Any, send: Any) -> Request:
        return cls(
            origin=origin,
            method=scope["method"],
            path=scope["raw_path"].decode("ascii"),
            query=parse_qs(scope["query_string"].decode("ascii"), keep_blank_values=True),
            headers={k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]},
            receive=receive,
            send=send,
        )

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[0].lower() in ("1", "true")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; ConnectionError when the client goes away before its end."""
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client went away")
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def json(self) -> Any:
        data = await self.body()
        return json.loads(data) if data else {}

    async def disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def drop(self) -> None:
        """Cut the connection without an answer. ASGI has no word for it; uvicorn's cycle has."""
        self.send.__self__.transport.abort()
        await self.disconnected()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond(self, response: Response) -> None:
        data, headers = response.encoded()
        headers = {"Content-Length": str(len(data)), **headers}
        await self.start(response.status, headers)
        await self.write(b"" if self.method == "HEAD" else data, more=False)
