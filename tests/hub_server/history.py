"""Branches, tags, squash and the list of LFS files. Source: spec hf-endpoints.md 4."""

from __future__ import annotations

from dataclasses import replace

from tests.hub_server.http import HubError, Request, Response, revision_not_found
from tests.hub_server.read import page
from tests.hub_server.repo import Repository, iso_time
from tests.hub_server.state import State


async def create_branch(state: State, request: Request, repo: Repository, name: str) -> Response:
    start = (await request.json()).get("startingPoint", "main")
    repo.add_ref(repo.branches, name, [repo.resolve(start).oid])
    return Response()


async def delete_branch(state: State, request: Request, repo: Repository, name: str) -> Response:
    if repo.branches.pop(name, None) is None:
        raise revision_not_found(name)
    repo.drop_unreachable()
    return Response()


async def create_tag(state: State, request: Request, repo: Repository, rev: str) -> Response:
    repo.add_ref(repo.tags, (await request.json())["tag"], repo.resolve(rev).oid)
    return Response()


async def delete_tag(state: State, request: Request, repo: Repository, name: str) -> Response:
    if repo.tags.pop(name, None) is None:
        raise revision_not_found(name)
    repo.drop_unreachable()
    return Response()


async def squash(state: State, request: Request, repo: Repository, branch: str) -> Response:
    if branch not in repo.branches:
        raise revision_not_found(branch)
    message = (await request.json()).get("message") or f"Super-squash branch '{branch}'"
    repo.squash(branch, message, request.user or "", state.now())
    return Response()


async def lfs_files(state: State, request: Request, repo: Repository) -> Response:
    """Everything ever pushed here and not deleted: a squash does not shorten this list."""
    names = {e.sha256: path for c in repo.commits.values() for path, e in c.tree.items()}
    records = [
        {
            "fileOid": sha256,
            "filename": names.get(sha256, ""),
            "oid": sha256,
            "pushedAt": iso_time(stored.pushed_at),
            "size": stored.size,
        }
        for sha256, stored in repo.objects.items()
    ]
    return page(state, request, records, 1000)


async def delete_lfs_files(state: State, request: Request, repo: Repository) -> Response:
    """Commits keep their ids here; on the live hub a rewritten history gets new ones."""
    deletions = (await request.json())["deletions"]
    gone = set(deletions["sha"])
    for sha256 in gone:
        repo.objects.pop(sha256, None)
    if deletions["rewriteHistory"]:
        for oid, commit in repo.commits.items():
            kept = {p: e for p, e in commit.tree.items() if e.sha256 not in gone}
            repo.commits[oid] = replace(commit, tree=kept)
    return Response()


async def duplicate_lfs_files(state: State, request: Request, repo: Repository) -> Response:
    """Give another repository the objects of this one, which a copy across repositories needs."""
    payload = await request.json()
    target = state.repo(payload["target"]["type"] + "s", payload["target"]["name"])
    failed = []
    for file in payload["files"]:
        sha256 = file["sha256"]
        if sha256 in repo.objects:
            target.objects[sha256] = repo.objects[sha256]
        else:
            failed.append({"sha256": sha256, "error": "not found"})
    if failed and len(failed) == len(payload["files"]):
        raise HubError(404, "None of the files exists")
    return Response({"success": not failed, "failed": failed})
