"""No connection outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diffurefill.data.storage import http
from diffurefill.data.storage.http import close_client


@pytest.fixture
def no_connection_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_client()
    yield
    close_client()


@pytest.fixture
def short_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_SECONDS", 0.1)
