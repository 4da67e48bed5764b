"""A real S3 server for fleets of processes."""

from __future__ import annotations

import urllib.request

import pytest

from diffurefill.store.base import new_nonce
from tests.store.conftest import s3_keys, s3_url

__all__ = ["s3_bucket", "s3_keys", "s3_url"]


@pytest.fixture
def s3_bucket(s3_url: str, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a run in a bucket of its own; child processes find the server too."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    bucket = f"fleet-{new_nonce()}"
    put_bucket = urllib.request.Request(f"{s3_url}/{bucket}", method="PUT")
    urllib.request.urlopen(put_bucket, timeout=30).close()
    return f"s3://{bucket}/run"
