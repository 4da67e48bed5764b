"""A store that ignores conditions is refused, also when only a race shows it."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from diffurefill.store import folder
from diffurefill.store.base import Busy, UnsafeStore, Version
from diffurefill.store.folder import FolderStore


class IgnoresEverything(FolderStore):
    """Every write wins, as with a server that drops If-None-Match and If-Match."""

    def publish(self, lane: str, changes: Any, *, expect: Any, nonce: Any = None) -> Version:
        return super().publish(lane, changes, expect=self.head(lane), nonce=nonce)


class IgnoresUpdates(FolderStore):
    """Honours create-if-absent only: the commonest fault among S3 look-alikes."""

    def publish(self, lane: str, changes: Any, *, expect: Any, nonce: Any = None) -> Version:
        head = self.head(lane) if expect else None
        return super().publish(lane, changes, expect=head, nonce=nonce)


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (IgnoresEverything, "created a lane twice"),
        (IgnoresUpdates, "took a stale update"),
    ],
)
def test_a_store_that_ignores_conditions_is_refused(
    tmp_path: Path, broken: type[FolderStore], fault: str
) -> None:
    with pytest.raises(UnsafeStore, match=fault):
        broken(tmp_path / "run", create=True).selftest()


def test_a_store_that_compares_but_does_not_swap_atomically_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All racing writers have compared before the first one writes; then each overwrites."""
    compared = threading.Barrier(4, timeout=30)

    def overwrite(tmp: Path, path: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            compared.wait()
        os.replace(tmp, path)

    monkeypatch.setattr(folder, "_link", overwrite)
    with pytest.raises(UnsafeStore, match="racing updates"):
        FolderStore(tmp_path / "run", create=True).selftest()


def test_a_store_that_asks_to_slow_down_is_waited_for(tmp_path: Path) -> None:
    class Throttled(FolderStore):
        num_busy = 0

        def publish(self, lane: str, changes: Any, *, expect: Any, nonce: Any = None) -> Version:
            if threading.current_thread() is not threading.main_thread() and self.num_busy < 5:
                self.num_busy += 1
                raise Busy("slow down", retry_after=0.0)
            return super().publish(lane, changes, expect=expect, nonce=nonce)

    store = Throttled(tmp_path / "run", create=True)
    store.selftest()
    assert store.num_busy >= 5
