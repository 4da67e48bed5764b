"""Contents to read, and reading them to the end."""

from __future__ import annotations

from diffurefill.data.storage.remote import RemoteFile
from diffurefill.runtime import philox


def noise(size: int, seed: int = 0) -> bytes:
    return philox("noise", seed).bytes(size)


def read_all(file: RemoteFile, step: int) -> bytes:
    parts = [file.read_at(at, step) for at in range(0, file.size, step)]
    return b"".join(parts)
