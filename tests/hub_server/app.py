"""Routing on the raw path, who may do what, faults around each handler, and the request log."""

from __future__ import annotations

import re
import traceback
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tests.hub_server import account, blobs, buckets, control, history, read, upload, xet
from tests.hub_server.faults import AFTER, BEFORE, Fault, forbidden, refusal
from tests.hub_server.http import HubError, Request, Response
from tests.hub_server.state import State

Handler = Callable[..., Awaitable[Response | None]]


@dataclass(frozen=True)
class Route:
    """`kind` names the request in faults and in the log; `writes` needs a token that may."""

    kind: str
    methods: str
    pattern: re.Pattern[str]
    handler: Handler
    writes: bool


def route(kind: str, methods: str, path: str, handler: Handler, writes: bool = False) -> Route:
    """{name} stands for one segment of the path, and for the shapes below."""
    shapes = {
        "{api}": r"/api/(?P<repo_type>models|datasets|spaces)/(?P<repo>[^/]+/[^/]+)",
        "{web}": r"/(?:(?P<repo_type>datasets|spaces)/)?(?P<repo>[^/]+/[^/]+?)",
        "{bucket}": r"(?P<bucket>[^/]+/[^/]+)",
        "{path...}": r"(?P<path>.+)",
    }
    for shape, regex in shapes.items():
        path = path.replace(shape, regex)
    path = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
    return Route(kind, methods, re.compile(path), handler, writes)


HUB_ROUTES = [
    route("whoami", "GET", "/api/whoami-v2", account.whoami),
    route("other", "GET", "/api/agent-harnesses", account.nothing),
    route("other", "HEAD", "/api/telemetry/.*", account.nothing),
    route("other", "POST", "/api/validate-yaml", account.validate_yaml),
    route("create_repo", "POST", "/api/repos/create", account.create_repo, True),
    route("delete_repo", "DELETE", "/api/repos/delete", account.delete_repo, True),
    route("complete", "POST", "/api/complete-multipart/{upload}", blobs.complete_upload),
    route("bucket_create", "POST", "/api/buckets/{namespace}/{name}", buckets.create, True),
    route("bucket_info", "GET", "/api/buckets/{bucket}", buckets.info),
    route("bucket_delete", "DELETE", "/api/buckets/{bucket}", buckets.delete, True),
    route("bucket_tree", "GET", "/api/buckets/{bucket}/tree", buckets.tree),
    route("bucket_tree", "GET", "/api/buckets/{bucket}/tree/{prefix}", buckets.tree),
    route("bucket_paths", "POST", "/api/buckets/{bucket}/paths-info", buckets.paths_info),
    route("bucket_batch", "POST", "/api/buckets/{bucket}/batch", buckets.batch, True),
    route("xet_token", "GET", "/api/buckets/{bucket}/xet-write-token", xet.bucket_token, True),
    route("xet_token", "GET", "/api/buckets/{bucket}/xet-read-token", xet.bucket_token),
    route("bucket_resolve", "HEAD GET", "/buckets/{bucket}/resolve/{path...}", buckets.resolve),
    route("info", "GET", "{api}", account.repo_info),
    route("info", "GET", "{api}/revision/{rev}", account.repo_info),
    route("auth_check", "GET", "{api}/auth-check/write", account.auth_check, True),
    route("preupload", "POST", "{api}/preupload/{rev}", upload.preupload, True),
    route("commit", "POST", "{api}/commit/{rev}", upload.commit, True),
    route("batch", "POST", "{web}.git/info/lfs/objects/batch", upload.lfs_batch, True),
    route("verify", "POST", "{web}.git/info/lfs/objects/verify", upload.lfs_verify, True),
    route("resolve", "HEAD GET", "{web}/resolve/{rev}/{path...}", read.resolve),
    route("tree", "GET", "{api}/tree/{rev}", read.tree),
    route("tree", "GET", "{api}/tree/{rev}/{path...}", read.tree),
    route("paths_info", "POST", "{api}/paths-info/{rev}", read.paths_info),
    route("commits", "GET", "{api}/commits/{rev}", read.commits),
    route("refs", "GET", "{api}/refs", read.refs),
    route("branch", "POST", "{api}/branch/{name}", history.create_branch, True),
    route("branch", "DELETE", "{api}/branch/{name}", history.delete_branch, True),
    route("tag", "POST", "{api}/tag/{rev}", history.create_tag, True),
    route("tag", "DELETE", "{api}/tag/{name}", history.delete_tag, True),
    route("squash", "POST", "{api}/super-squash/{branch}", history.squash, True),
    route("lfs_files", "GET", "{api}/lfs-files", history.lfs_files, True),
    route("lfs_files", "POST", "{api}/lfs-files/batch", history.delete_lfs_files, True),
    route("lfs_files", "POST", "{api}/lfs-files/duplicate", history.duplicate_lfs_files, True),
    route("xet_token", "GET", "{api}/xet-write-token/{rev}", xet.repo_token, True),
    route("xet_token", "GET", "{api}/xet-read-token/{rev}", xet.repo_token),
]

BLOB_ROUTES = [
    route("blob", "HEAD GET", "/object/{key}", blobs.download),
    route("put", "PUT", "/upload/{repo_type}/(?P<repo>[^/]+/[^/]+)/{sha256}", blobs.upload),
    route("put_part", "PUT", "/part/{upload}/{number}", blobs.upload_part),
]

KINDS = sorted({r.kind for r in HUB_ROUTES + BLOB_ROUTES})


def find_route(routes: list[Route], request: Request) -> tuple[Route, dict[str, Any]]:
    for found in routes:
        match = found.pattern.fullmatch(request.path)
        if match is None or request.method not in found.methods.split():
            continue
        parts = match.groupdict()
        if "repo_type" in parts:
            parts["repo_type"] = parts["repo_type"] or "models"
        return found, {k: unquote(v) for k, v in parts.items() if v is not None}
    raise HubError(404, f"Sorry, there is nothing at {request.method} {request.path}")


class Origin:
    """One of the two origins, as an ASGI application."""

    def __init__(self, name: str, routes: list[Route], state: State) -> None:
        self.name, self.routes, self.state = name, routes, state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request.from_scope(self.name, scope, receive, send)
        if request.path.startswith("/_control/"):
            await self.control(request)
            return
        entry: dict[str, Any] = {"origin": self.name, "method": request.method}
        entry |= {"path": request.path, "query": request.query, "status": None, "fault": None}
        entry["authorized"] = "authorization" in request.headers
        self.state.log.append(entry)
        try:
            response = await self.handle(request, entry)
        except HubError as error:
            response = error.response()
        except ConnectionError:
            return
        except Exception:
            self.state.errors.append(traceback.format_exc())
            response = Response({"error": traceback.format_exc()}, 500)
        if response is None:
            return
        entry["status"] = response.status
        response.headers = {**self.common_headers(request), **response.headers}
        await request.respond(response)

    async def control(self, request: Request) -> None:
        try:
            response = await control.answer(self.state, request)
        except HubError as error:
            response = error.response()
        await request.respond(response)

    def common_headers(self, request: Request) -> dict[str, str]:
        headers = {"X-Request-Id": uuid.uuid4().hex}
        if self.name == "hub":
            name = "resolvers" if request.kind == "resolve" else "api"
            headers["RateLimit"] = f'"{name}";r=900;t=240'
            headers["RateLimit-Policy"] = f'"fixed window";"{name}";q=1000;w=300'
        return headers

    async def handle(self, request: Request, entry: dict[str, Any]) -> Response | None:
        """The answer, or None when the request got what it gets already."""
        found, parts = find_route(self.routes, request)
        request.kind = entry["kind"] = found.kind
        fault = self.state.faults.take(found.kind, request.path)
        entry["fault"] = fault and fault.action
        if fault is not None and fault.action in BEFORE:
            return await self.act_out(fault, request)
        if self.name == "hub":
            self.authorize(found, request, entry)
        if fault is not None and fault.action not in AFTER:
            request.fault = fault.action
        if "repo_type" in parts:
            # The blob origin's links carry their own right of entry, as signed links do.
            asker = request if self.name == "hub" else None
            parts["repo"] = self.state.repo(parts.pop("repo_type"), parts["repo"], asker)
        response = await found.handler(self.state, request, **parts)
        if fault is not None and fault.action in AFTER:
            return await self.act_out(fault, request)
        if response is None:
            entry["status"] = 200
        return response

    def authorize(self, found: Route, request: Request, entry: dict[str, Any]) -> None:
        account.identify(request)
        entry["user"] = request.user
        if not found.writes:
            return
        if request.user is None:
            raise HubError(401, "Invalid username or password.")
        if account.is_read_only(request):
            raise forbidden()

    async def act_out(self, fault: Fault, request: Request) -> Response | None:
        error = refusal(fault)
        if error is not None:
            return error.response()
        if fault.action.startswith("hang"):
            await blobs.wait_for_clear(self.state, request)
        await request.drop()
        return None
