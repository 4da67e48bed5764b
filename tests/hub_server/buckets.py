"""Buckets: files by name, no history, no precondition. Source: spec hf-endpoints.md 6."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.hub_server import xet
from tests.hub_server.http import HubError, Request, Response, entry_not_found
from tests.hub_server.read import page
from tests.hub_server.repo import iso_time
from tests.hub_server.state import State


@dataclass(frozen=True)
class BucketFile:
    """`size` in bytes; `mtime` and `uploaded_at` in Unix seconds."""

    size: int
    xet_hash: str
    mtime: float
    uploaded_at: float


@dataclass
class Bucket:
    id: str
    private: bool
    created_at: float
    files: dict[str, BucketFile] = field(default_factory=dict)


async def create(state: State, request: Request, namespace: str, name: str) -> Response:
    bucket = f"{request.user if namespace == 'me' else namespace}/{name}"
    url = f"{state.hub_url}/buckets/{bucket}"
    if bucket in state.buckets:
        raise HubError(409, "You already created this bucket", body={"url": url})
    private = (await request.json()).get("visibility") == "private"
    state.buckets[bucket] = Bucket(bucket, private, state.now())
    return Response({"url": url})


async def info(state: State, request: Request, bucket: str) -> Response:
    found = state.bucket(bucket)
    return Response(
        {
            "id": found.id,
            "private": found.private,
            "createdAt": iso_time(found.created_at),
            "size": sum(f.size for f in found.files.values()),
            "totalFiles": len(found.files),
        }
    )


async def delete(state: State, request: Request, bucket: str) -> Response:
    state.bucket(bucket)
    del state.buckets[bucket]
    return Response()


def file_record(path: str, file: BucketFile) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path,
        "size": file.size,
        "xetHash": file.xet_hash,
        "mtime": iso_time(file.mtime),
        "uploadedAt": iso_time(file.uploaded_at),
    }


async def tree(state: State, request: Request, bucket: str, prefix: str = "") -> Response:
    """The prefix is matched by letters, not by folders."""
    records: dict[str, dict] = {}
    for path, file in state.bucket(bucket).files.items():
        if not path.startswith(prefix):
            continue
        below = path.find("/", len(prefix))
        if below >= 0 and not request.flag("recursive"):
            stamp = iso_time(file.uploaded_at)
            records[path[:below]] = {
                "type": "directory",
                "path": path[:below],
                "uploadedAt": stamp,
            }
        else:
            records[path] = file_record(path, file)
    return page(state, request, [records[path] for path in sorted(records)], 1000)


async def paths_info(state: State, request: Request, bucket: str) -> Response:
    files = state.bucket(bucket).files
    paths = (await request.json())["paths"]
    return Response([file_record(path, files[path]) for path in paths if path in files])


async def batch(state: State, request: Request, bucket: str) -> Response:
    """Each line stands or falls alone: what succeeded stays although the rest failed."""
    found = state.bucket(bucket)
    lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
    failed = []
    for line in lines:
        error = apply_line(state, found, line)
        if error is not None:
            failed.append({"path": line["path"], "error": error})
    answer = {
        "success": not failed,
        "processed": len(lines),
        "succeeded": len(lines) - len(failed),
        "failed": failed,
    }
    return Response(answer, 422 if lines and len(failed) == len(lines) else 200)


def apply_line(state: State, bucket: Bucket, line: dict[str, Any]) -> str | None:
    """The reason when the operation cannot be done."""
    path = line["path"]
    if line["type"] == "deleteFile":
        return None if bucket.files.pop(path, None) else "File not found"
    file = xet.find(state.folder, line["xetHash"])
    if file is None:
        return f"Xet hash {line['xetHash']} not found"
    mtime = line.get("mtime", 1000 * state.now()) / 1000
    bucket.files[path] = BucketFile(file.size, file.hash, mtime, state.now())
    return None


async def resolve(state: State, request: Request, bucket: str, path: str) -> Response:
    file = state.bucket(bucket).files.get(path)
    if file is None:
        raise entry_not_found()
    token = f"{state.hub_url}/api/buckets/{bucket}/xet-read-token"
    headers = {
        "Location": f"{state.blob_url}/object/{file.xet_hash}",
        "X-Linked-Size": str(file.size),
        "X-Linked-Etag": f'"{file.xet_hash}"',
        "X-Xet-Hash": file.xet_hash,
        "Link": f'<{token}>; rel="xet-auth"',
    }
    return Response({}, 302, headers)
