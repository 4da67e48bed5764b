"""Ranges of a file over HTTP: one short request each, and its answer checked before it is used.

A response that is held open while a trainer computes is cut by some proxy sooner or later, so none
is. Every request of this room goes through here, with time limits, and no message shows an address
beyond what the caller calls it: a redirect's target holds a signature.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

# What huggingface_hub speaks with. Not its shared session: that waits for ever, and is closed under
# the requests of other threads when a connection fails.
import httpx2
from huggingface_hub.utils import parse_ratelimit_headers

from diffurefill.config import UserError
from diffurefill.data.storage.patience import Passing

CONNECT_SECONDS, STALL_SECONDS = 20.0, 60.0
SLOWEST_BYTES_PER_SECOND = 50_000.0
"""A body that trickles in more slowly than this, stalls apart, is asked for again."""
TAIL_BYTES = 1 << 16
"""Read with a file's size at its opening: a Parquet file's footer is there, and most fit."""

_PASSING = (408, 425, 429)

Headers = Callable[[], Mapping[str, str]]
Refusal = Callable[[httpx2.Response], UserError]

_lock = threading.Lock()
_client: httpx2.Client | None = None


def client() -> httpx2.Client:
    """This process's client, for all threads."""
    global _client
    with _lock:
        if _client is None:
            _client = httpx2.Client(follow_redirects=True)
        return _client


def close_client() -> None:
    """Close what idle connections there are; the next request makes a new client."""
    global _client
    with _lock:
        closing, _client = _client, None
    if closing is not None:
        closing.close()


def _forget_client() -> None:
    """In a forked child: the connections are its parent's."""
    global _client, _lock
    _lock, _client = threading.Lock(), None


atexit.register(close_client)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_client)


@contextlib.contextmanager
def asked(
    method: str, url: str, shown: str, headers: Mapping[str, str], **options: Any
) -> Generator[httpx2.Response]:
    """The answer to one request, its body not yet read; closed afterwards.

    Follows redirects; the client drops the Authorization header where one leads to another origin.
    Raises Passing for what may pass by itself, UserError for what cannot.
    """
    limits = httpx2.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS)
    try:
        with client().stream(method, url, headers=headers, timeout=limits, **options) as response:
            if response.status_code in _PASSING or response.status_code >= 500:
                raise Passing(
                    f"the server answered {response.status_code}", asked_wait(response.headers)
                )
            yield response
    except (
        httpx2.UnsupportedProtocol,
        httpx2.LocalProtocolError,
        httpx2.TooManyRedirects,
        httpx2.InvalidURL,
    ) as error:
        raise UserError(
            f"{shown} cannot be read ({type(error).__name__}): check the address"
        ) from None
    except httpx2.HTTPError as error:
        raise Passing(f"{type(error).__name__} ({error})") from None


def asked_wait(headers: Mapping[str, str]) -> float:
    """Seconds that a refusal asks to wait: Retry-After in either form, or the hub's own header."""
    asked = headers.get("Retry-After", "").strip()
    if asked.isdigit():
        return float(asked)
    with contextlib.suppress(ValueError, TypeError):  # by the server's own clock, not by ours
        until, now = (parsedate_to_datetime(date) for date in (asked, headers.get("Date", "")))
        return max((until - now).total_seconds(), 0.0)
    limit = parse_ratelimit_headers(headers)
    return limit.reset_in_seconds + 1.0 if limit is not None and limit.remaining == 0 else 0.0


def read_body(
    blocks: Iterable[bytes], length: int, clock: Callable[[], float] = time.monotonic
) -> bytes:
    """The body, which must be `length` bytes long. Raises Passing where it is not, or too slow."""
    end = clock() + STALL_SECONDS + length / SLOWEST_BYTES_PER_SECOND
    parts, received = [], 0
    for block in blocks:
        parts.append(block)
        received += len(block)
        if received > length:
            raise Passing("the server sent more than was asked for")
        if clock() > end:
            raise Passing("the answer came too slowly")
    if received < length:
        raise Passing(f"an answer ended after {received} of {length} bytes")
    return b"".join(parts)


def _sent(response: httpx2.Response) -> tuple[int, int, int]:
    """(first byte, end, size of the file) that the answer says it holds; a plain 200 holds all."""
    headers = response.headers
    if response.status_code == 200 and headers.get("Content-Length", "").isdigit():
        size = int(headers["Content-Length"])
        return 0, size, size
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers.get("Content-Range", "").strip())
    if found is None:
        raise Passing("the server does not say which part it sent")
    return int(found[1]), int(found[2]) + 1, int(found[3])


class HttpRanges:
    """See remote.Ranges. `uri` is what messages call the file; `refusal` explains an error answer.

    `headers` is asked for each request: a login may be renewed in the middle of a run.
    """

    def __init__(self, url: str, uri: str, headers: Headers, refusal: Refusal) -> None:
        self.uri, self.size = uri, 0
        self._url, self._headers, self._refusal = url, headers, refusal
        self._tags: dict[str, str] = {}

    def open(self) -> bytes:
        """Sets `size`; returns the file's last bytes, TAIL_BYTES at most."""
        tail = self._opened(f"bytes=-{TAIL_BYTES}")
        # Some servers give ranges, but not from the end.
        tail = self._opened("bytes=0-0") if tail is None else tail
        if tail is None:
            raise Passing("the server sent the whole file where a part was asked for")
        return tail

    def _opened(self, wanted: str) -> bytes | None:
        """None where the server does not take this range."""
        with self._asked(wanted) as response:
            if response.headers.get("Content-Range", "").strip() == "bytes */0":
                return b""
            if response.status_code == 416:
                return None
            self._check(response)
            if response.status_code == 200 and response.headers.get("Accept-Ranges") != "bytes":
                raise UserError(
                    f"{self.uri}: the server cannot send parts of a file; download it and name "
                    "the local copy"
                )
            start, end, size = _sent(response)
            expected = (0, 1) if wanted == "bytes=0-0" else (max(size - TAIL_BYTES, 0), size)
            if (start, end) != expected:
                if response.status_code == 200:
                    return None
                raise Passing("the server sent another part than was asked for")
            tail = read_body(response.iter_raw(), end - start)
            self.size, tag = size, _tag(response)
            self._tags = dict([tag]) if tag else {}
            return tail if end == size else b""

    def read(self, start: int, end: int) -> bytes:
        with self._asked(f"bytes={start}-{end - 1}") as response:
            if response.status_code == 416:
                raise self._moved()
            self._check(response)
            sent = _sent(response)
            if response.status_code == 206 and sent[2] != self.size:
                raise self._moved()
            if sent != (start, end, self.size):
                raise Passing("the server sent another part than was asked for")
            tag = _tag(response)
            if tag is not None and self._tags.setdefault(*tag) != tag[1]:
                raise self._moved()
            return read_body(response.iter_raw(), end - start)

    def _asked(self, wanted: str) -> contextlib.AbstractContextManager[httpx2.Response]:
        # Compressed on the way, the bytes of a range would be other bytes.
        headers = {**self._headers(), "Range": wanted, "Accept-Encoding": "identity"}
        return asked("GET", self._url, self.uri, headers)

    def _check(self, response: httpx2.Response) -> None:
        status, origins = response.status_code, {r.url.origin for r in response.history}
        if status in (401, 403) and origins and response.url.origin not in origins:
            # The first server let us in; what it signed for the second ran out on the way.
            raise Passing(f"the server of the file's bytes answered {status}")
        if status not in (200, 206):
            raise self._refusal(response)

    def _moved(self) -> UserError:
        return UserError(
            f"{self.uri} changed while it was read: every position in it is void; name a fixed "
            "copy, or start a new run"
        )


def _tag(response: httpx2.Response) -> tuple[str, str] | None:
    """(host, tag of the content there). Mirrors tag alike content differently, so tags are compared
    host by host; a hub's own tag tells most, since where it redirects to may change at any time."""
    for answer in (*response.history, response):
        if tag := answer.headers.get("X-Linked-Etag"):
            return answer.url.host, tag
    if tag := response.headers.get("ETag"):
        return response.url.host, tag.removeprefix("W/")
    return None
