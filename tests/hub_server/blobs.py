"""The second origin: large contents, as a content network or S3 would serve and take them.

Uploads are streamed to the disk and hashed on the way. Source: spec hf-endpoints.md 2, 3, 7.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import shutil
from pathlib import Path

from tests.hub_server import xet
from tests.hub_server.http import HubError, Request, Response
from tests.hub_server.repo import LfsObject, Repository
from tests.hub_server.state import State

BLOCK = 1 << 18


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, end) of a single Range, end exclusive; None for the whole. 416 past the end."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        return max(size - int(last), 0), size
    start, end = int(first), size if last == "" else min(int(last) + 1, size)
    if start >= size or end <= start:
        raise HubError(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, end


def ranged(headers: dict[str, str], request: Request, size: int) -> tuple[int, int, int]:
    """(status, start, end) of an answer with `size` bytes; fills in the headers."""
    span = byte_range(request.headers.get("range"), size)
    start, end = span or (0, size)
    headers |= {"Content-Length": str(end - start), "Accept-Ranges": "bytes"}
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return 206 if span else 200, start, end


async def download(state: State, request: Request, key: str) -> None:
    """Answers by itself, block by block, and acts out the faults of a content."""
    path = state.object_path(key)
    if not path.exists() and not await xet.materialise(state.folder, key, path):
        raise HubError(404, "NoSuchKey")
    size = path.stat().st_size
    if request.fault == "truncate":
        size //= 2
    headers = {"ETag": f'"{key}"', "Content-Type": "application/octet-stream"}
    status, start, end = ranged(headers, request, size)
    await request.start(status, headers)
    if request.method == "HEAD":
        await request.write(b"", more=False)
        return
    stop = (start + end) // 2 if request.fault in ("cut", "stall") else end
    with open(path, "rb") as f:
        f.seek(start)
        at = start
        while at < stop:
            block = bytearray(f.read(min(BLOCK, stop - at)))
            if request.fault == "flip" and at == start:
                block[len(block) // 2] ^= 1
            at += len(block)
            await request.write(bytes(block), more=True)
    if request.fault == "cut":
        await request.drop()
    elif request.fault == "stall":
        await wait_for_clear(state, request)
        await request.drop()
    else:
        await request.write(b"", more=False)


async def wait_for_clear(state: State, request: Request) -> None:
    """Until the faults are cleared or the client gives up, whichever comes first."""
    before = state.faults.cleared
    gone = asyncio.ensure_future(request.disconnected())
    while state.faults.cleared == before and not gone.done():
        await asyncio.wait([gone], timeout=0.02)
    if not gone.done():
        gone.cancel()


async def receive_file(request: Request, path: Path) -> tuple[str, str, int]:
    """Stream the body to `path`; (sha256, md5, size). A client that goes away leaves nothing."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    sha256, md5, size = hashlib.sha256(), hashlib.md5(), 0
    try:
        with open(partial, "wb") as f:
            async for chunk in request.chunks():
                f.write(chunk)
                sha256.update(chunk)
                md5.update(chunk)
                size += len(chunk)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return sha256.hexdigest(), md5.hexdigest(), size


async def upload(state: State, request: Request, repo: Repository, sha256: str) -> Response:
    incoming = state.folder / "parts" / secrets.token_hex(8)
    digest, md5, size = await receive_file(request, incoming)
    if digest != sha256:
        incoming.unlink()
        raise HubError(400, "The provided sha256 does not match what was computed.")
    adopt(state, repo, sha256, incoming, size)
    return Response(b"", headers={"ETag": f'"{md5}"'})


def adopt(state: State, repo: Repository, sha256: str, path: Path, size: int) -> None:
    path.replace(state.object_path(sha256))
    repo.objects[sha256] = LfsObject(size, state.now())


async def upload_part(state: State, request: Request, upload: str, number: str) -> Response:
    if upload not in state.uploads:
        raise HubError(404, "NoSuchUpload")
    path = state.folder / "parts" / f"{upload}.{int(number)}"
    _, md5, _ = await receive_file(request, path)
    state.uploads[upload]["etags"][int(number)] = f'"{md5}"'
    return Response(b"", headers={"ETag": f'"{md5}"'})


async def complete_upload(state: State, request: Request, upload: str) -> Response:
    """Join the parts. 400 when they are not the announced ones or not the announced content."""
    payload = await request.json()
    record = state.uploads.get(upload)
    if record is None:
        raise HubError(404, "NoSuchUpload")
    told = {part["partNumber"]: part["etag"] for part in payload["parts"]}
    if told != record["etags"] or len(told) != record["num_parts"]:
        raise HubError(400, "InvalidPart")
    base = state.folder / "parts" / upload
    sha256, size = await asyncio.to_thread(join_parts, base, record["num_parts"])
    if sha256 != record["sha256"] or payload["oid"] != sha256:
        raise HubError(400, "The provided sha256 does not match what was computed.")
    adopt(state, record["repo"], sha256, base, size)
    del state.uploads[upload]
    return Response({"success": True})


def join_parts(base: Path, num_parts: int) -> tuple[str, int]:
    parts = [base.with_name(f"{base.name}.{n}") for n in range(1, num_parts + 1)]
    with open(base, "wb") as whole:
        for part in parts:
            with open(part, "rb") as f:
                shutil.copyfileobj(f, whole, BLOCK)
            part.unlink()
    with open(base, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest(), base.stat().st_size
