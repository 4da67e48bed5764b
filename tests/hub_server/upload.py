"""Preupload, LFS batch and verify, commit. Source: spec hf-endpoints.md 2."""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

from tests.hub_server import xet
from tests.hub_server.account import LFS_SUFFIXES
from tests.hub_server.faults import commit_conflict
from tests.hub_server.http import HubError, Request, Response, entry_not_found, revision_not_found
from tests.hub_server.repo import Entry, LfsObject, Repository, git_oid, lfs_pointer
from tests.hub_server.state import State


async def preupload(state: State, request: Request, repo: Repository, rev: str) -> Response:
    tree = repo.resolve(rev).tree
    files: list[dict[str, Any]] = []
    for file in (await request.json())["files"]:
        path = file["path"]
        large = path.endswith(LFS_SUFFIXES) or file["size"] > state.settings.lfs_bytes
        answer: dict[str, Any] = {
            "path": path,
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False,
        }
        if path in tree:
            answer["oid"] = tree[path].sha256 or tree[path].oid
        files.append(answer)
    return Response({"files": files})


async def lfs_batch(state: State, request: Request, repo: Repository) -> Response:
    payload = await request.json()
    objects = payload["objects"]
    if request.fault == "object_error":
        error = {"code": 413, "message": "Object is too large for the remaining storage."}
        return Response({"objects": [{**o, "error": error} for o in objects]})
    parts = "multipart" in payload.get("transfers", [])
    split = parts and any(o["size"] > state.settings.part_bytes for o in objects)
    answers = [batch_answer(state, repo, o, parts) for o in objects]
    return Response({"transfer": "multipart" if split else "basic", "objects": answers})


def batch_answer(state: State, repo: Repository, wanted: dict, parts: bool) -> dict:
    """No `actions` when the repository holds the object already: the client then skips it."""
    sha256, size = wanted["oid"], wanted["size"]
    if sha256 in repo.objects:
        return {"oid": sha256, "size": size}
    if parts and size > state.settings.part_bytes:
        upload = multipart_action(state, repo, sha256, size)
    else:
        upload = {
            "href": f"{state.blob_url}/upload/{repo.repo_type}/{repo.id}/{sha256}",
            "header": {},
        }
    verify = f"{state.web_url(repo.repo_type, repo.id)}.git/info/lfs/objects/verify"
    actions = {"upload": upload, "verify": {"href": verify, "header": {}}}
    return {"oid": sha256, "size": size, "authenticated": True, "actions": actions}


def multipart_action(state: State, repo: Repository, sha256: str, size: int) -> dict:
    step = state.settings.part_bytes
    count, key = math.ceil(size / step), uuid.uuid4().hex
    state.uploads[key] = {"sha256": sha256, "repo": repo, "num_parts": count, "etags": {}}
    urls = {f"{n:05d}": f"{state.blob_url}/part/{key}/{n}" for n in range(1, count + 1)}
    return {
        "href": f"{state.hub_url}/api/complete-multipart/{key}",
        "header": {"chunk_size": str(step), **urls},
    }


async def lfs_verify(state: State, request: Request, repo: Repository) -> Response:
    payload = await request.json()
    stored = repo.objects.get(payload["oid"])
    if stored is None or stored.size != payload["size"]:
        raise HubError(404, "The object is not here")
    return Response()


async def commit(state: State, request: Request, repo: Repository, rev: str) -> Response:
    lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
    header, operations = lines[0]["value"], lines[1:]
    if not repo.has_head(rev):
        raise revision_not_found(rev)
    parent = header.get("parentCommit")
    if parent is not None and not repo.resolve(rev).oid.startswith(parent):
        raise commit_conflict()
    tree = dict(repo.resolve(rev).tree)
    for operation in operations:
        apply_operation(state, repo, tree, operation["key"], operation["value"])
    state.count_commit(request.user or "")
    answer: dict[str, Any] = {"success": True, "hookOutput": ""}
    if request.flag("create_pr"):
        rev = repo.open_pull(rev)
        answer["pullRequestUrl"] = f"{state.web_url(repo.repo_type, repo.id)}/discussions/{rev[8:]}"
    made = repo.add_commit(
        rev,
        tree,
        title=header["summary"],
        message=header.get("description", ""),
        author=request.user or "",
        date=state.now(),
    )
    url = f"{state.web_url(repo.repo_type, repo.id)}/commit/{made.oid}"
    return Response({**answer, "commitOid": made.oid, "commitUrl": url})


def apply_operation(
    state: State, repo: Repository, tree: dict[str, Entry], key: str, value: Mapping[str, Any]
) -> None:
    path = value["path"].rstrip("/")
    match key:
        case "file":
            data = base64.b64decode(value["content"])
            oid = git_oid(data)
            state.store_small(oid, data)
            tree[path] = Entry(oid, len(data))
        case "lfsFile":
            stored = known_object(state, repo, value["oid"])
            pointer = lfs_pointer(value["oid"], stored.size)
            tree[path] = Entry(git_oid(pointer), stored.size, value["oid"])
        case "deletedFile":
            if tree.pop(path, None) is None:
                raise entry_not_found()
        case "deletedFolder":
            inside = [p for p in tree if p.startswith(path + "/")]
            if not inside:
                raise entry_not_found()
            for p in inside:
                del tree[p]
        case _:
            raise HubError(400, f"Unknown operation {key}")


def known_object(state: State, repo: Repository, sha256: str) -> LfsObject:
    """What the repository holds under this digest, or what came in through Xet just now."""
    if sha256 not in repo.objects:
        found = xet.find(state.folder, sha256)
        if found is None:
            raise HubError(
                400, f"LFS pointer pointed to a file that does not exist: sha256 {sha256}"
            )
        repo.objects[sha256] = LfsObject(found.size, state.now(), found.hash)
    return repo.objects[sha256]
