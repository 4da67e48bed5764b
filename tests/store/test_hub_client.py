"""The hub's client without a hub: what is set up once, and a transfer that does not end."""

import contextlib
import io
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from diffurefill.store import hub_client


@pytest.mark.parametrize("asked", [True, False])
def test_progress_bars_are_for_who_asks(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    disabled: list[bool] = []
    monkeypatch.setattr(hub_client, "_prepared", False)
    monkeypatch.setattr(hub_client, "set_client_factory", lambda factory: None)
    monkeypatch.setattr(hub_client, "disable_progress_bars", lambda: disabled.append(True))
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    if asked:
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    for _ in range(2):
        hub_client.prepare_client()
    assert disabled == ([] if asked else [True])


def test_more_than_a_file_s_bytes_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = itertools.repeat(b"x" * 100, 50)
    response = SimpleNamespace(status_code=200, iter_bytes=lambda: blocks)

    @contextlib.contextmanager
    def stream(*_: Any, **__: Any) -> Iterator[SimpleNamespace]:
        yield response

    monkeypatch.setattr(hub_client, "get_session", lambda: SimpleNamespace(stream=stream))
    monkeypatch.setattr(hub_client, "hf_raise_for_status", lambda response: None)
    f = io.BytesIO()
    found = hub_client.download("https://hub.invalid/file", {}, f, size=1000)
    assert found.size == len(f.getvalue()) == 1100
