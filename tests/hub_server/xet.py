"""Xet without a server of its own: tokens that send the client's Rust side to a local folder.

The released `hf_xet` stores real chunks, xorbs and shards under `local:///<folder>`; a shard tells
which file hash belongs to which sha256. One uploading process at a time. Source: spec
hf-endpoints.md 5.
"""

from __future__ import annotations

import asyncio
import importlib
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hub_server.http import Request, Response
from tests.hub_server.repo import Repository
from tests.hub_server.state import State

RECORD = 48
"""Bytes of a file header, of a segment and of the metadata in a shard."""
HAS_METADATA, HAS_VERIFICATION = 1 << 30, 1 << 31


@dataclass(frozen=True)
class XetFile:
    """`size` in bytes; `sha256` is absent where the uploader was told to skip it."""

    hash: str
    size: int
    sha256: str | None


def cas_folder(folder: Path) -> Path:
    return folder / "cas"


def hex_hash(raw: bytes) -> str:
    """Xet prints a hash as four little-endian 64-bit words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def shard_files(data: bytes) -> Iterator[XetFile]:
    at = RECORD
    while at + RECORD <= len(data) and data[at : at + 32] != b"\xff" * 32:
        raw, flags, count = data[at : at + 32], *struct.unpack_from("<2I", data, at + 32)
        at += RECORD
        size = sum(struct.unpack_from("<I", data, at + RECORD * i + 36)[0] for i in range(count))
        at += RECORD * count * (2 if flags & HAS_VERIFICATION else 1)
        sha256 = None
        if flags & HAS_METADATA:
            sha256 = hex_hash(data[at : at + 32])
            at += RECORD
        yield XetFile(hex_hash(raw), size, sha256)


def stored(folder: Path) -> Iterator[XetFile]:
    for shard in sorted(cas_folder(folder).glob("xet/xorbs/shards/*.mdb")):
        yield from shard_files(shard.read_bytes())


def find(folder: Path, key: str) -> XetFile | None:
    """By sha256, or by Xet hash."""
    return next((f for f in stored(folder) if key in (f.sha256, f.hash)), None)


async def materialise(folder: Path, key: str, path: Path) -> bool:
    """Rebuild a Xet file at `path` for a plain GET; False when there is no such file."""
    file = find(folder, key)
    if file is None:
        return False
    await asyncio.to_thread(_rebuild, folder, file, path)
    return True


def _rebuild(folder: Path, file: XetFile, path: Path) -> None:
    hf_xet: Any = importlib.import_module("hf_xet")  # heavy, and it has no stubs
    partial = path.with_name(path.name + ".partial")
    session = hf_xet.XetSession()
    with session.new_file_download_group(endpoint=f"local://{cas_folder(folder)}") as group:
        group.start_download_file(hf_xet.XetFileInfo(file.hash, file.size), str(partial))
    partial.replace(path)


def token_response(state: State) -> Response:
    """In headers for Python and in the body for Rust: without the body an upload hangs."""
    url = f"local://{cas_folder(state.folder)}"
    expires = int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": "xet",
        "X-Xet-Token-Expiration": str(expires),
    }
    return Response({"casUrl": url, "accessToken": "xet", "exp": expires}, headers=headers)


async def repo_token(state: State, request: Request, repo: Repository, rev: str) -> Response:
    if rev != "None":
        repo.resolve(rev)
    return token_response(state)


async def bucket_token(state: State, request: Request, bucket: str) -> Response:
    state.bucket(bucket)
    return token_response(state)
