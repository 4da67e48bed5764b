"""What the object store asks of a bucket, in a few verbs; obstore's errors in our words.

Two clients look at the same bucket. `client` repeats what failed for a passing reason. `once`
does not, and makes the contested write: what the first answer said must be known.
Source: spec hub.md C1.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffurefill.store.base import (
    Busy,
    Conflict,
    Denied,
    NotFound,
    StoreError,
    Unknown,
    UnsafeStore,
    new_nonce,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode
    from obstore.store import ObjectStore

WINDOW_BYTES = 16 << 20
"""Bytes of one request, up or down. A slow line must move them within addresses.CLIENT's times."""
NUM_WINDOWS = 4
"""Requests under way at once. Their product bounds the memory of a transfer."""

SLOW_DOWN_SECONDS = 5.0
PASSING_SECONDS = 2.0


class NoObject(NotFound):
    """The bucket answers, and has no object of that name."""


@dataclass(frozen=True)
class Bucket:
    """A prefix of a bucket. Keys are relative to it. Every verb raises StoreErrors only."""

    uri: str
    name: str
    keys_advice: str
    """What a person whose keys are missing or refused should do."""
    client: ObjectStore
    once: ObjectStore

    def where(self, key: str) -> str:
        return f"{self.uri.rstrip('/')}/{key}"

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        """A small object; None when it does not exist. Corrupt size: b"" above `max_bytes`."""
        try:
            with self._errors():
                answer = self.client.get(key)
                if max_bytes is not None and answer.meta["size"] > max_bytes:
                    return b""
                return bytes(answer.bytes())
        except NoObject:
            return None

    def meta(self, key: str) -> ObjectMeta | None:
        """{size, last_modified, e_tag, version}; None when it does not exist."""
        try:
            with self._errors():
                return self.client.head(key)
        except NoObject:
            return None

    def windows(self, key: str, size: int) -> Generator[bytes]:
        """The first `size` bytes of an object in order, fetched a few windows ahead."""

        def get(start: int) -> bytes:
            length = min(WINDOW_BYTES, size - start)
            with self._errors():
                return bytes(self.client.get_range(key, start=start, length=length))

        pending: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(NUM_WINDOWS) as pool:
            for start in range(0, size, WINDOW_BYTES):
                pending.append(pool.submit(get, start))
                if len(pending) == NUM_WINDOWS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def put(self, key: str, content: bytes | Path) -> None:
        """Write an object whatever was there. A file goes up in parts."""
        with self._errors():
            self.client.put(key, content, chunk_size=WINDOW_BYTES, max_concurrency=NUM_WINDOWS)

    def put_if(self, key: str, content: bytes, meta: ObjectMeta | None) -> None:
        """Write an object if it is still the one of `meta`, or still absent for None.

        Raises Conflict when it is not (or when this very write was sent twice), Busy when it
        surely was not written, Unknown when that is not known.
        """
        mode: PutMode = "create"
        if meta is not None:
            tag: Any = {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
            mode = tag
        with self._errors(contested=True):
            self.once.put(key, content, mode=mode)

    def delete(self, key: str) -> None:
        with self._errors():
            self.client.delete(key)

    def folders(self, key: str) -> list[str]:
        """The names directly below `key` that have something below them."""
        with self._errors():
            listing = self.client.list_with_delimiter(key)
        return [prefix.rpartition("/")[2] for prefix in listing["common_prefixes"]]

    def keys_below(self, key: str) -> list[str]:
        with self._errors():
            return [entry["path"] for batch in self.client.list(key) for entry in batch]

    def now(self) -> datetime:
        """The store's own clock, read by writing: its times are only compared with it."""
        with self._errors():
            self.client.put("clock", new_nonce().encode())
            return self.client.head("clock")["last_modified"]

    @contextlib.contextmanager
    def _errors(self, *, contested: bool = False) -> Generator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            # Without the cause: its text may hold a signed address.
            raise translate(error, self, contested) from None


_LOST = "AlreadyExistsError", "PreconditionError"
_REFUSED = "PermissionDeniedError", "UnauthenticatedError"
_NO_BUCKET = "NoSuchBucket", "ContainerNotFound"
_NO_KEYS = re.compile(
    r"169\.254\.|/latest/api/token|/latest/meta-data|omputeMetadata|token request"
)
"""Where obstore asks for short-lived keys when the environment names none."""


def translate(error: Exception, bucket: Bucket, contested: bool = False) -> StoreError:
    """What happened, by kind, status and code. `contested`: a write that may move a head."""
    kind, text, name = type(error).__name__, str(error), bucket.name
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else 0
    found = re.search(r"<Code>(\w+)</Code>", text)
    code = found[1] if found else ""
    shown = " ".join(str(part) for part in (status, code) if part) or "no answer"
    if _NO_KEYS.search(text):
        # Asking for short-lived keys may fail for a moment, days into a run.
        message = f"no usable keys for {name}: {bucket.keys_advice}"
        return Denied(message) if 400 <= status < 500 else Busy(message, PASSING_SECONDS)
    if code in _NO_BUCKET:
        return NotFound(f"no bucket {name}: make it, or correct {bucket.uri}")
    if status == 409 and code != "BlobAlreadyExists":  # which is Azure's 412
        return Busy(f"{name} is busy with another write ({shown})", PASSING_SECONDS)
    if contested and kind in _LOST:
        return Conflict(f"{bucket.uri}: another writer was faster ({shown})")
    if isinstance(error, FileNotFoundError):
        return NoObject(f"{bucket.uri}: no such object, or no such bucket")
    if kind in _REFUSED or status in (401, 403):
        return Denied(
            f"{name} refused this process ({shown}): its keys must be valid and may read, write, "
            f"list and delete there; {bucket.keys_advice}"
        )
    if kind == "NotSupportedError" or status == 501:
        return UnsafeStore(f"{name} has no conditional writes: keep the run elsewhere")
    if status == 429 or code == "SlowDown":
        return Busy(f"{name} asks to slow down ({shown})", SLOW_DOWN_SECONDS)
    if "redirect without LOCATION" in text or (300 <= status < 500 and status not in (408, 412)):
        return Denied(f"{name} cannot serve this ({shown}): check address and region")
    if contested and "kind: Connect" not in text:
        return Unknown(f"{name} may have taken the write ({shown})")
    return Busy(f"{name} is out of reach ({shown})", PASSING_SECONDS)
