"""Files, trees, history and refs, read only. Source: spec hf-endpoints.md 3."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlencode

from tests.hub_server.blobs import ranged
from tests.hub_server.http import Request, Response, entry_not_found
from tests.hub_server.repo import Commit, Entry, Repository, git_oid, iso_time, lfs_pointer
from tests.hub_server.state import State


def page(state: State, request: Request, items: list, size: int) -> Response:
    """One page of `items`, with the link to the next."""
    limit = int(request.query.get("limit", [str(size)])[0])
    start = int(request.query.get("cursor", ["0"])[0])
    end = start + min(limit, size)
    headers = {}
    if end < len(items):
        query = {**{k: v[0] for k, v in request.query.items()}, "cursor": str(end)}
        headers["Link"] = f'<{state.hub_url}{request.path}?{urlencode(query)}>; rel="next"'
    return Response(items[start:end], headers=headers)


async def resolve(
    state: State, request: Request, repo: Repository, rev: str, path: str
) -> Response:
    commit = repo.resolve(rev, stale=request.fault == "stale")
    headers = {"X-Repo-Commit": commit.oid}
    entry = commit.tree.get(path)
    if entry is None:
        raise entry_not_found(headers)
    if entry.sha256 is not None:
        return redirect(state, repo, commit, entry)
    data = state.load_small(entry.oid)
    headers |= {"ETag": f'"{entry.oid}"', "Content-Type": "text/plain"}
    status, start, end = ranged(headers, request, len(data))
    if request.fault == "flip" and data:
        data = bytes([data[0] ^ 1]) + data[1:]
    return Response(data[start:end], status, headers)


def redirect(state: State, repo: Repository, commit: Commit, entry: Entry) -> Response:
    sha256 = entry.sha256 or ""
    headers = {
        "Location": f"{state.blob_url}/object/{sha256}",
        "X-Repo-Commit": commit.oid,
        "X-Linked-Etag": f'"{sha256}"',
        "X-Linked-Size": str(entry.size),
        "ETag": f'"{entry.oid}"',
    }
    stored = repo.objects.get(sha256)
    if stored is not None and stored.xet_hash is not None:
        api = f"{state.hub_url}/api/{repo.repo_type}/{repo.id}"
        headers["X-Xet-Hash"] = stored.xet_hash
        headers["Link"] = f'<{api}/xet-read-token/{commit.oid}>; rel="xet-auth"'
    return Response({}, 302, headers)


def file_record(repo: Repository, path: str, entry: Entry, expand: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "type": "file",
        "path": path,
        "size": entry.size,
        "oid": entry.oid,
    }
    if entry.sha256 is not None:
        pointer = len(lfs_pointer(entry.sha256, entry.size))
        record["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": pointer}
        stored = repo.objects.get(entry.sha256)
        if stored is not None and stored.xet_hash is not None:
            record["xetHash"] = stored.xet_hash
    if expand:
        last = repo.commits.get(entry.commit)
        record["lastCommit"] = last and {
            "id": last.oid,
            "title": last.title,
            "date": iso_time(last.date),
        }
    return record


def folder_record(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": git_oid(path.encode()), "size": 0}


async def tree(
    state: State, request: Request, repo: Repository, rev: str, path: str = ""
) -> Response:
    commit = repo.resolve(rev, stale=request.fault == "stale")
    prefix = f"{path}/" if path else ""
    files = {p: e for p, e in commit.tree.items() if p.startswith(prefix)}
    if prefix and not files:
        raise entry_not_found({"X-Repo-Commit": commit.oid})
    recursive, expand = request.flag("recursive"), request.flag("expand")
    records: dict[str, dict] = {}
    for full, entry in files.items():
        steps = full[len(prefix) :].split("/")
        for depth in range(1, len(steps)):
            if depth == 1 or recursive:
                folder = prefix + "/".join(steps[:depth])
                records[folder] = folder_record(folder)
        if len(steps) == 1 or recursive:
            records[full] = file_record(repo, full, entry, expand)
    ordered = [records[name] for name in sorted(records)]
    return page(state, request, ordered, 50 if expand else 1000)


async def paths_info(state: State, request: Request, repo: Repository, rev: str) -> Response:
    commit = repo.resolve(rev, stale=request.fault == "stale")
    form = parse_qs((await request.body()).decode())
    expand = form.get("expand", [""])[0].lower() in ("1", "true")
    records = []
    for path in form.get("paths", []):
        if path in commit.tree:
            records.append(file_record(repo, path, commit.tree[path], expand))
        elif any(p.startswith(f"{path}/") for p in commit.tree):
            records.append(folder_record(path))
    return Response(records)


async def commits(state: State, request: Request, repo: Repository, rev: str) -> Response:
    head = repo.resolve(rev, stale=request.fault == "stale")
    records = [
        {
            "id": c.oid,
            "title": c.title,
            "message": c.message,
            "authors": [{"user": c.author}],
            "date": iso_time(c.date),
        }
        for c in repo.history(head)
    ]
    return page(state, request, records, 50)


async def refs(state: State, request: Request, repo: Repository) -> Response:
    stale = request.fault == "stale"
    answer: dict[str, Any] = {
        "branches": [
            {"name": n, "ref": f"refs/heads/{n}", "targetCommit": repo.head(n, stale)}
            for n in repo.branches
        ],
        "tags": [
            {"name": n, "ref": f"refs/tags/{n}", "targetCommit": oid}
            for n, oid in repo.tags.items()
        ],
        "converts": [],
    }
    if request.flag("include_prs"):
        answer["pullRequests"] = [
            {"name": n, "ref": n, "targetCommit": oid} for n, oid in repo.pulls.items()
        ]
    return Response(answer)
