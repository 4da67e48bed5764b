"""From the URI of a run to its bucket: address, keys and time limits.

    s3://bucket/prefix                  and what speaks S3: AWS_ENDPOINT_URL (R2, MinIO, ...)
    gs://bucket/prefix
    az://account/container/prefix
    hf://buckets/owner/name/prefix      hub buckets, through their S3 gateway

obstore reads keys from the environment; no key is ever part of a URI or of a message.
Source: spec hub.md A6 and C1.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diffurefill.config import UserError
from diffurefill.store.base import check_path
from diffurefill.store.bucket import Bucket

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

HUB_GATEWAY = "https://s3.hf.co"
"""HF_S3_ENDPOINT overrides it; the owner's name is added as the path."""

KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL off AWS)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a service account's JSON file",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "make an S3 key pair for your hub token in the hub's settings, and set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to it",
}
SHAPES = {
    "s3": "s3://bucket/run",
    "gs": "gs://bucket/run",
    "az": "az://account/container/run",
    "hf": "hf://buckets/owner/name/run",
}

# The longest single request moves WINDOW_BYTES (bucket.py), so these bound every wait.
CLIENT: ClientConfig = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "180s"}
PATIENT: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}
ONCE: RetryConfig = {"max_retries": 0}


def open_bucket(uri: str) -> Bucket:
    """The bucket at `uri`; UserError with what to do. Sends nothing yet."""
    scheme, _, rest = uri.partition("://")
    parts = rest.removesuffix("/").split("/")
    num_names = {"s3": 1, "gs": 1, "az": 2, "hf": 3}[scheme]
    names, prefix = parts[:num_names], "/".join(parts[num_names:])
    if len(names) < num_names or not all(names):
        raise UserError(f"{uri}: give {SHAPES[scheme]}")
    if prefix:
        check_path(prefix)
    try:
        import obstore.store  # noqa: F401
    except ImportError:
        raise UserError(f"{uri} needs obstore: pip install 'diffurefill[s3]'") from None
    make = {"s3": _s3, "gs": _gcs, "az": _azure, "hf": _hub}[scheme]
    try:
        client = make(names, prefix or None, PATIENT)
        once = make(names, prefix or None, ONCE)
    except UserError:
        raise
    except Exception:  # obstore's own error may show the key it could not parse
        raise UserError(f"{uri}: keys or address cannot be used; {KEYS[scheme]}") from None
    return Bucket(uri, names[-1], KEYS[scheme], client, once)


def _s3(names: list[str], prefix: str | None, retry: RetryConfig) -> ObjectStore:
    endpoint = _from_environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if endpoint and not os.environ.get("AWS_ACCESS_KEY_ID"):
        raise UserError(f"no keys for {_shown(endpoint)}: {KEYS['s3']}")
    return _s3_store(names[0], prefix, retry, endpoint)


def _hub(names: list[str], prefix: str | None, retry: RetryConfig) -> ObjectStore:
    if not (os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")):
        raise UserError(f"no keys for the hub bucket {names[1]}/{names[2]}: {KEYS['hf']}")
    gateway = _from_environment("HF_S3_ENDPOINT") or HUB_GATEWAY
    return _s3_store(names[2], prefix, retry, f"{gateway}/{names[1]}", region="us-east-1")


def _s3_store(
    bucket: str, prefix: str | None, retry: RetryConfig, endpoint: str | None, **config: Any
) -> ObjectStore:
    from obstore.store import S3Store

    if endpoint:
        # Both names: the environment's AWS_ENDPOINT_URL_S3 would win over a plain `endpoint`.
        config.update(endpoint=endpoint, aws_endpoint_url_s3=endpoint)
    return S3Store(
        bucket,
        prefix=prefix,
        client_options=_client(endpoint),
        retry_config=retry,
        disable_bulk_delete=True,  # not every server that speaks S3 has it
        **config,
    )


def _gcs(names: list[str], prefix: str | None, retry: RetryConfig) -> ObjectStore:
    from obstore.store import GCSStore

    endpoint = _from_environment("GOOGLE_BASE_URL")
    config: Any = {"base_url": endpoint} if endpoint else {}
    return GCSStore(
        names[0], prefix=prefix, client_options=_client(endpoint), retry_config=retry, **config
    )


def _azure(names: list[str], prefix: str | None, retry: RetryConfig) -> ObjectStore:
    from obstore.store import AzureStore

    endpoint = _from_environment("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    config: Any = {"endpoint": endpoint} if endpoint else {}
    return AzureStore(
        names[1],
        account_name=names[0],
        prefix=prefix,
        client_options=_client(endpoint),
        retry_config=retry,
        **config,
    )


def _from_environment(*names: str) -> str | None:
    """The first endpoint that one of `names` gives; http only on this machine."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return None
    endpoint = os.environ[name]
    address = urlsplit(endpoint)
    if address.scheme == "http" and address.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise UserError(f"{name}={_shown(endpoint)}: use https; http is for this machine only")
    return endpoint.rstrip("/")


def _shown(endpoint: str) -> str:
    """scheme://host:port of an address, which may hold a password."""
    address = urlsplit(endpoint)
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}"


def _client(endpoint: str | None) -> ClientConfig:
    return {**CLIENT, "allow_http": endpoint is not None and endpoint.startswith("http:")}
