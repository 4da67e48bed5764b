"""Manners of a hub client: time limits, what errors mean, a commit limit, verified downloads.

The hub's own client waits for ever by default, retries some requests and not others, and tells a
lost compare-and-swap from a lost connection by classes of several libraries. All of that is
turned into the Store contract's errors here. Source: spec hub.md A1, A2, A5.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import BinaryIO

import httpx2
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    disable_progress_bars,
    get_session,
    hf_raise_for_status,
    parse_ratelimit_headers,
    set_client_factory,
)
from huggingface_hub.utils._http import default_client_factory

from diffurefill.store.base import Busy, Conflict, Denied, NotFound, Ref, StoreError, Unknown

TIME_LIMITS = {"connect": 20.0, "read": 90.0, "write": 90.0, "pool": 90.0}
"""Seconds. The hub gives up a commit after 60 s, so its own answer comes before ours."""
STALL_SECONDS = 300.0
SLOWEST_BYTES_PER_SECOND = 250_000.0

PASSING_PAUSE = 5.0
RATE_LIMIT_PAUSE = 60.0

_preparing = threading.Lock()
_prepared = False


def prepare_client() -> None:
    """Give every request of this process time limits; some of the client's calls ask for none.

    Only the first call does anything: replacing the client while a request is under way would
    break that request. Progress bars would drown the log of a worker, unless asked for.
    """
    global _prepared
    with _preparing:
        if not _prepared:
            set_client_factory(_client_with_limits)
            if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
                disable_progress_bars()
            _prepared = True


def _client_with_limits() -> httpx2.Client:
    client = default_client_factory()
    client.event_hooks = {
        "request": [*client.event_hooks["request"], _fill_limits],
        "response": client.event_hooks["response"],
    }
    return client


def _fill_limits(request: httpx2.Request) -> None:
    asked = request.extensions.get("timeout") or {}
    filled = {key: asked.get(key) or limit for key, limit in TIME_LIMITS.items()}
    request.extensions = {**request.extensions, "timeout": filled}


def longest_transfer(size: int) -> float:
    """Seconds after which a transfer of `size` bytes has stalled, however it trickles."""
    return STALL_SECONDS + size / SLOWEST_BYTES_PER_SECOND


# --- errors ---

# The request was never sent, so a commit cannot have landed.
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, OfflineModeIsEnabled)


class NoRepository(Denied):
    """No such repository, or one that this token may not see: the hub does not say which."""


class NoFile(NotFound):
    """The commit is there and has no such file."""


@contextlib.contextmanager
def hub_errors(uri: str, doing: str, *, unsure: bool = False) -> Generator[None]:
    """Whatever the client raises -> a StoreError that says what was being done.

    `unsure` is for the one request that may have taken effect although it failed (a commit):
    lost answers and 5xx become Unknown there, and Busy everywhere else.
    """
    try:
        yield
    except (httpx2.HTTPError, RuntimeError, ValueError, OSError) as error:
        if _is_local(error):
            raise
        raise _store_error(error, uri, doing, unsure) from error


def _is_local(error: Exception) -> bool:
    """A file of ours that cannot be read or written is not the hub's doing."""
    named = isinstance(error, OSError) and not isinstance(error, httpx2.HTTPError)
    return named and getattr(error, "errno", None) is not None


def _store_error(error: Exception, uri: str, doing: str, unsure: bool) -> StoreError:
    answer = _answer(error)
    if isinstance(error, LocalTokenNotFoundError):
        return Denied(f"no token for {uri}: set HF_TOKEN to a token that may write there")
    if isinstance(error, OfflineModeIsEnabled):
        return Denied(f"{uri} cannot be reached: HF_HUB_OFFLINE is set; unset it")
    if isinstance(error, httpx2.UnsupportedProtocol):
        return Denied(f"{uri} cannot be reached: HF_ENDPOINT must begin with https://")
    if isinstance(error, ValueError) and answer is None and "LFS batch" in str(error):
        return Denied(f"{uri}: the hub takes no file while {doing}{_redacted(str(error))}")
    if answer is None:
        what = f"{uri}: no answer while {doing} ({type(error).__name__})"
        if unsure and not isinstance(error, _NEVER_SENT):
            return Unknown(what)
        return Busy(what, PASSING_PAUSE)
    return _answered(answer, uri, doing, unsure)


def _answer(error: BaseException | None) -> HfHubHTTPError | None:
    """The hub's answer behind an error; an upload wraps it in a RuntimeError."""
    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error


def _answered(error: HfHubHTTPError, uri: str, doing: str, unsure: bool) -> StoreError:
    status, said = error.response.status_code, _redacted(error.server_message)
    what = f"{uri}: the hub answered {status} while {doing}{said}"
    if isinstance(error, RepositoryNotFoundError):
        return NoRepository(
            f"no repository {uri}, or the token may not see it: check the name, and set HF_TOKEN "
            "to a token with access"
        )
    if status in (401, 403):
        return Denied(f"{what}; set HF_TOKEN to a token that may write there")
    if status == 412 or (unsure and isinstance(error, RevisionNotFoundError)):
        return Conflict(what)
    if isinstance(error, RemoteEntryNotFoundError):
        return NoFile(what)
    if status == 404 or (status == 400 and "lfs" in said.lower()):
        return NotFound(what)
    if status == 409:  # another commit holds the repository's lock; the head has not moved
        return Busy(what, PASSING_PAUSE)
    if status == 429:
        return Busy(what, _retry_after(error.response))
    if status == 408 or status >= 500:
        return Unknown(what) if unsure else Busy(what, PASSING_PAUSE)
    return Denied(what)


def _redacted(said: str | None) -> str:
    """What the server said, in brackets. It may echo what it was sent: a token is cut out."""
    text = re.sub(r"\bhf_\w+", "hf_***", " ".join((said or "").split()))
    return f" ({text})" if text else ""


def _retry_after(response: httpx2.Response) -> float:
    """Seconds. The RateLimit header comes with every answer: it is the cause only when r = 0."""
    asked = response.headers.get("Retry-After", "").strip()
    if asked.isdigit():
        return float(asked)
    limit = parse_ratelimit_headers(response.headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds) + 1.0
    return RATE_LIMIT_PAUSE


# --- commits ---

HOUR = 3600.0


class CommitLimit:
    """Commits of this process in any hour; the hub is known to refuse more than 128.

    Counts what was asked for, also what the hub then refused: nobody says what it counts. Which
    commits a fleet does without long before that is fleet/budget.py's question.
    """

    def __init__(self, per_hour: int, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._per_hour, self._clock = per_hour, clock
        self._spent: deque[float] = deque()
        self._lock = threading.Lock()

    def spend(self) -> None:
        """Raises Busy when the hour's commits are used up."""
        with self._lock:
            now = self._clock()
            while self._spent and self._spent[0] <= now - HOUR:
                self._spent.popleft()
            if len(self._spent) >= self._per_hour:
                wait = self._spent[0] + HOUR - now
                raise Busy(f"{self._per_hour} commits within an hour are enough", wait)
            self._spent.append(now)


# --- downloads ---


def download(url: str, headers: dict[str, str], f: BinaryIO, size: int | None = None) -> Ref:
    """Stream `url` to `f` from its start; returns what came, which may be anything.

    A connection that breaks is resumed as long as each attempt brings something. Stops when more
    than `size` bytes came. Raises what the client raises.
    """
    end = time.monotonic() + longest_transfer(size or 0)
    digest, received = hashlib.sha256(), 0
    while True:
        before = received
        asked = {**headers, "Accept-Encoding": "identity"}
        if received > 0:
            asked["Range"] = f"bytes={received}-"
        try:
            with get_session().stream("GET", url, headers=asked) as response:
                hf_raise_for_status(response)
                if response.status_code != 206 and received:  # the server gives no ranges
                    f.seek(0)
                    f.truncate()
                    digest, received, before = hashlib.sha256(), 0, 0
                for block in response.iter_bytes():
                    f.write(block)
                    digest.update(block)
                    received += len(block)
                    if size is not None and received > size:
                        break
                    if time.monotonic() > end:
                        raise httpx2.ReadTimeout("the transfer is too slow")
            return Ref(digest.hexdigest(), received)
        except httpx2.TransportError:
            if received == before or time.monotonic() > end:
                raise
