"""Files behind a network: what a person may name, and reading them a few ranges at a time."""

from __future__ import annotations

import io
from collections.abc import Callable
from posixpath import basename
from typing import Protocol
from urllib.parse import unquote, urlsplit

from diffurefill.config import UserError
from diffurefill.data.storage.http import HttpRanges
from diffurefill.data.storage.hub_files import hub_ranges, list_hub, pinned_hub
from diffurefill.data.storage.listing import File
from diffurefill.data.storage.object_files import list_objects, object_ranges
from diffurefill.data.storage.patience import LISTING, READING, Patience, retried

BUFFER_BYTES = 1 << 20
"""Reading on fetches so much at once."""
JUMP_BYTES = 1 << 16
"""Reading elsewhere fetches so much: whoever looks at one page's header may want no more."""
LARGEST_BYTES = 8 << 20
"""Of one request. A longer read takes several, so that a broken line repeats little."""


class Ranges(Protocol):
    """One try each; both raise Passing for what may pass by itself, and UserError otherwise."""

    uri: str
    """What messages call the file."""
    size: int
    """In bytes; known once `open` returned."""

    def open(self) -> bytes:
        """The end of the file, as much of it as comes for free with its size; may be empty."""
        ...

    def read(self, start: int, end: int) -> bytes:
        """Exactly the bytes [start, end), which lie within the file and are not none."""
        ...


class RemoteFile:
    """See files.RandomAccess. Holds BUFFER_BYTES of where it reads, and the file's end apart from
    them, so that looking up a footer disturbs nothing."""

    def __init__(self, ranges: Ranges, patience: Patience = READING) -> None:
        self._ranges, self._patience = ranges, patience
        tail = retried(ranges.uri, ranges.open, patience)
        self.uri, self.size = ranges.uri, ranges.size
        self._tail = _Window(self.size - len(tail), tail)
        self._window = _Window(0, b"")
        self._next = 0

    def read_at(self, offset: int, length: int) -> bytes:
        """See RandomAccess. UserError when the file stays out of reach, or is another by now."""
        if offset < 0:
            raise ValueError(f"{self.uri}: offset {offset}")
        end = min(offset + length, self.size)
        if offset >= end:
            return b""
        if self._tail.start <= offset:
            return self._tail.cut(offset, end)
        goes_on = offset == self._next or self._window.start <= offset <= self._window.end
        self._next = end
        head = self._window.cut(offset, end) if goes_on else b""
        missing = end - offset - len(head)
        if not missing:
            return head
        ahead = BUFFER_BYTES if goes_on else JUMP_BYTES
        if missing >= ahead:
            return self._fetch(head, end - missing, end)
        start = end - missing
        self._window = _Window(start, b"")  # let go of what it held before its successor comes
        self._window = _Window(start, self._fetch(b"", start, min(start + ahead, self.size)))
        return head + self._window.cut(start, end)

    def close(self) -> None:
        self._window = self._tail = _Window(0, b"")

    def _fetch(self, head: bytes, start: int, end: int) -> bytes:
        """`head` and the bytes [start, end) after it."""
        whole = io.BytesIO()  # gives its bytes away without copying them
        whole.write(head)
        for first in range(start, end, LARGEST_BYTES):
            last = min(first + LARGEST_BYTES, end)
            whole.write(retried(self.uri, self._attempt(first, last), self._patience))
        return whole.getvalue()

    def _attempt(self, start: int, end: int) -> Callable[[], bytes]:
        return lambda: self._ranges.read(start, end)


class _Window:
    """Some bytes of a file, from `start` on."""

    def __init__(self, start: int, content: bytes) -> None:
        self.start, self.end, self._content = start, start + len(content), content

    def cut(self, start: int, end: int) -> bytes:
        """What it has of [start, end), from `start` on; nothing where it does not hold `start`."""
        if not self.start <= start < self.end:
            return b""
        return self._content[start - self.start : end - self.start]


# --- addresses -----------------------------------------------------------------------------------

SHAPES = "hf://datasets/owner/name, s3://, gs://, az:// or https://"


def list_remote(address: str) -> list[File]:
    """See files.list_files."""
    match _scheme(address):
        case "hf":
            return list_hub(address)
        case "http" | "https":
            return [_http_file(address)]
        case _:
            return list_objects(address)


def pinned_remote(address: str) -> str:
    """See files.pinned."""
    return pinned_hub(address) if address.startswith("hf://datasets/") else address


def open_remote(uri: str, patience: Patience = READING) -> RemoteFile:
    """See files.open_file."""
    match _scheme(uri):
        case "hf":
            return RemoteFile(hub_ranges(uri), patience)
        case "http" | "https":
            return RemoteFile(_http_ranges(uri), patience)
        case _:
            return RemoteFile(object_ranges(uri), patience)


def _scheme(address: str) -> str:
    scheme = address.partition("://")[0]
    if scheme not in ("hf", "s3", "gs", "az", "http", "https"):
        raise UserError(f"{address}: a data source is a local path, {SHAPES}")
    return scheme


def _http_file(address: str) -> File:
    shown = _shown(address)
    name = unquote(basename(urlsplit(address).path))
    if not name:
        raise UserError(f"{shown} names no file: over http every file is named by itself")
    return File(address, name, open_remote(address, LISTING).size)


def _http_ranges(address: str) -> HttpRanges:
    shown = _shown(address)

    def refusal(status: int) -> UserError:
        if status in (401, 403):
            return UserError(
                f"{shown}: the server answered {status}: download the file with a login and name "
                "the local copy"
            )
        if status in (404, 410):
            return UserError(f"{shown} does not exist ({status}): check the address")
        return UserError(f"{shown}: the server answered {status}: check the address")

    return HttpRanges(address, shown, dict, lambda response: refusal(response.status_code))


def _shown(address: str) -> str:
    """Without user, password and query: any of them may be a secret."""
    try:
        parts = urlsplit(address)
    except ValueError:
        raise UserError("an http address among the data sources is malformed") from None
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
