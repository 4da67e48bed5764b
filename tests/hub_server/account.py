"""Who asks, and repositories as a whole. Source: spec hf-endpoints.md 1.

Token `hf_<name>` is the user <name>; `hf_ro_<name>` is the same user with a read-only token.
"""

from __future__ import annotations

import uuid
from typing import Any

from tests.hub_server.http import HubError, Request, Response
from tests.hub_server.repo import Entry, Repository, git_oid, iso_time
from tests.hub_server.state import State

LFS_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npy", ".npz", ".parquet", ".arrow",
    ".zip", ".gz", ".tar", ".gguf", ".onnx", ".pkl", ".zst",
)  # fmt: skip
ATTRIBUTES = "".join(f"*{s} filter=lfs diff=lfs merge=lfs -text\n" for s in LFS_SUFFIXES).encode()


def identify(request: Request) -> None:
    """Sets `request.user`; a token that is not one of ours is refused, as on the live hub."""
    header = request.headers.get("authorization")
    if header is None:
        return
    token = header.removeprefix("Bearer ")
    if not token.startswith("hf_"):
        raise HubError(401, "Invalid credentials in Authorization header")
    request.user = token.removeprefix("hf_").removeprefix("ro_")


def is_read_only(request: Request) -> bool:
    return request.headers.get("authorization", "").startswith("Bearer hf_ro_")


async def whoami(state: State, request: Request) -> Response:
    if request.user is None:
        raise HubError(401, "Invalid username or password.")
    role = "read" if is_read_only(request) else "write"
    return Response(
        {
            "type": "user",
            "id": f"id-{request.user}",
            "name": request.user,
            "fullname": request.user,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"displayName": "t", "role": role}},
        }
    )


def repo_key(record: dict[str, Any], request: Request) -> tuple[str, str]:
    owner = record.get("organization") or request.user
    return record.get("type", "model") + "s", f"{owner}/{record['name']}"


async def create_repo(state: State, request: Request) -> Response:
    record = await request.json()
    key = repo_key(record, request)
    url = state.web_url(*key)
    answer = {"url": url, "name": key[1], "id": uuid.uuid4().hex}
    if key in state.repos:
        raise HubError(409, "You already created this model repo", body=answer)
    private = record.get("visibility") == "private"
    repo = Repository(*key, private, created_at=state.now())
    oid = git_oid(ATTRIBUTES)
    state.store_small(oid, ATTRIBUTES)
    tree = {".gitattributes": Entry(oid, len(ATTRIBUTES))}
    repo.add_commit(
        "main", tree, title="initial commit", author=request.user or "", date=state.now()
    )
    state.repos[key] = repo
    return Response({**answer, "private": private})


async def delete_repo(state: State, request: Request) -> Response:
    key = repo_key(await request.json(), request)
    state.repo(*key)
    del state.repos[key]
    return Response()


async def repo_info(
    state: State, request: Request, repo: Repository, rev: str = "main"
) -> Response:
    commit = repo.resolve(rev, stale=request.fault == "stale")
    siblings: list[dict] = []
    for path, entry in commit.tree.items():
        sibling: dict = {"rfilename": path}
        if request.flag("blobs"):
            sibling |= {"size": entry.size, "blobId": entry.oid}
            if entry.sha256 is not None:
                sibling["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": 134}
        siblings.append(sibling)
    return Response(
        {
            "_id": git_oid(repo.id.encode()),
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.id.split("/")[0],
            "sha": commit.oid,
            "lastModified": iso_time(commit.date),
            "createdAt": iso_time(repo.created_at),
            "private": repo.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }
    )


async def auth_check(state: State, request: Request, repo: Repository) -> Response:
    """Whether the token may write here; the route has asked already."""
    return Response()


async def validate_yaml(state: State, request: Request) -> Response:
    await request.json()
    return Response({"errors": [], "warnings": []})


async def nothing(state: State, request: Request) -> Response:
    return Response({})
