"""Files in buckets, through obstore:

    s3://bucket/path                  and what speaks S3: AWS_ENDPOINT_URL (R2, MinIO, ...)
    gs://bucket/path
    az://account/container/path

Keys come from the environment, where obstore looks for them; none is part of an address or of a
message.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diffurefill.config import UserError
from diffurefill.data.storage.listing import File, find_files
from diffurefill.data.storage.patience import LISTING, Passing, retried

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SHAPES = {
    "s3": "s3://bucket/path",
    "gs": "gs://bucket/path",
    "az": "az://account/container/path",
}
KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a "
    "public bucket; AWS_REGION, and AWS_ENDPOINT_URL off AWS",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a service account's JSON file, or "
    "GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_SKIP_SIGNATURE=true "
    "for a public container",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_NO_KEYS = re.compile(r"169\.254\.|/latest/api/token|/latest/meta-data|omputeMetadata")
"""Where obstore asks for short-lived keys when the environment names none."""


def list_objects(address: str) -> list[File]:
    """See files.list_files."""
    place = Place(address)
    found = find_files(address, place.path, place)
    return [File(f"{place.root}/{path}", name, size) for path, name, size in found]


def object_ranges(uri: str) -> ObjectRanges:
    return ObjectRanges(uri, Place(uri))


class Place:
    """A bucket; see listing.Listing. `root` is its own address, `path` what was named in it."""

    def __init__(self, address: str) -> None:
        scheme, _, rest = address.partition("://")
        num_names = 2 if scheme == "az" else 1
        names = rest.split("/")[:num_names]
        if len(names) < num_names or not all(names):
            raise UserError(f"{address}: give {SHAPES[scheme]}")
        self.root = f"{scheme}://{'/'.join(names)}"
        self.path = "/".join(rest.split("/")[num_names:]).strip("/")
        self.keys_advice = KEYS[scheme]
        try:
            self.store = _open_store(scheme, names)
        except ImportError:
            raise UserError(f"{address} needs obstore: pip install 'diffurefill[s3]'") from None

    def size_of(self, path: str) -> int | None:
        def attempt() -> int | None:
            with contextlib.suppress(NoObject), self.errors(path):
                return self.store.head(path)["size"]
            return None

        return retried(f"{self.root}/{path}", attempt, LISTING)

    def below(self, folder: str) -> dict[str, int]:
        def attempt() -> dict[str, int]:
            with self.errors(folder):
                batches = self.store.list(folder or None)
                return {entry["path"]: entry["size"] for batch in batches for entry in batch}

        return retried(f"{self.root}/{folder}", attempt, LISTING)

    @contextlib.contextmanager
    def errors(self, path: str) -> Generator[None]:
        """obstore's errors as Passing, NoObject or UserError; its words may show a signature."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise _translated(error, f"{self.root}/{path}", self.keys_advice) from None


class ObjectRanges:
    """See remote.Ranges."""

    def __init__(self, uri: str, place: Place) -> None:
        self.uri, self.size = uri, 0
        self._place = place
        self._tag: str | None = None

    def open(self) -> bytes:
        with self._place.errors(self._place.path):
            meta = self._place.store.head(self._place.path)
        self.size, self._tag = meta["size"], meta["e_tag"]
        return b""

    def read(self, start: int, end: int) -> bytes:
        with self._place.errors(self._place.path):
            answer = self._place.store.get(self._place.path, options={"range": (start, end)})
            if (answer.meta["size"], answer.meta["e_tag"]) != (self.size, self._tag):
                raise UserError(
                    f"{self.uri} changed while it was read: every position in it is void; name a "
                    "fixed copy, or start a new run"
                )
            content = bytes(answer.bytes())
        if len(content) != end - start:
            raise Passing(f"an answer held {len(content)} of {end - start} bytes")
        return content


class NoObject(UserError):
    """The bucket answers, and has no object of that name."""


def _translated(error: Exception, where: str, keys_advice: str) -> Exception:
    kind, text = type(error).__name__, str(error)
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else 0
    if _NO_KEYS.search(text):
        # The machine's own service of keys may fail for a moment, days into a run.
        message = f"no keys for {where}: {keys_advice}"
        return UserError(message) if 400 <= status < 500 else Passing(message)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return UserError(f"no such bucket: {where}")
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError":
        return NoObject(f"no such file or folder: {where}")
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return UserError(f"{where} may not be read with these keys: {keys_advice}")
    if status == 416:
        return UserError(f"{where} changed while it was read: name a fixed copy")
    if "redirect without LOCATION" in text or (
        300 <= status < 500 and status not in (408, 425, 429)
    ):
        return UserError(f"{where} cannot be read ({status or kind}): check address and region")
    return Passing(f"the store answered {status}" if status else f"no answer ({kind})")


def _open_store(scheme: str, names: list[str]) -> ObjectStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    endpoint = _endpoint(scheme)
    options: Any = {
        "client_options": {
            "connect_timeout": "20s",
            "read_timeout": "60s",
            "timeout": "240s",
            "allow_http": endpoint is not None and endpoint.startswith("http:"),
        },
        "retry_config": {"max_retries": 0},  # patience.py repeats, by one budget for all
    }
    config: Any = {}
    try:
        if scheme == "s3":
            _require_keys(endpoint)
            # Both names: the environment's AWS_ENDPOINT_URL_S3 would win over a plain `endpoint`.
            config = {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint} if endpoint else {}
            return S3Store(names[0], **options, **config)
        if scheme == "gs":
            config = {"base_url": endpoint} if endpoint else {}
            return GCSStore(names[0], **options, **config)
        config = {"endpoint": endpoint} if endpoint else {}
        return AzureStore(names[1], account_name=names[0], **options, **config)
    except UserError:
        raise
    except Exception:  # obstore's own error may show the key that it could not parse
        raise UserError(
            f"{scheme}://{'/'.join(names)}: address or keys cannot be used; {KEYS[scheme]}"
        ) from None


def _endpoint(scheme: str) -> str | None:
    name = next((name for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)
    if name is None:
        return None
    address = urlsplit(endpoint := os.environ[name])
    if address.scheme == "http" and address.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise UserError(f"{name}={endpoint}: use https; http is for this machine only")
    return endpoint.rstrip("/")


def _require_keys(endpoint: str | None) -> None:
    """Off AWS nobody hands out keys; asking the machine for them would only take long."""
    has_keys = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE")
    if endpoint and not has_keys:
        raise UserError(f"no keys for {endpoint}: {KEYS['s3']}")
