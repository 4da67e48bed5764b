"""Squashing a lane's branch, and what others see of it. Source: spec fleet.md 5.2 (4)."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import CommitOperationDelete, HfApi

from diffurefill.store.base import Busy, Conflict, Corrupt, Version
from diffurefill.store.hub import HubStore
from tests.hub_server import Hub
from tests.store.hub_helpers import REPO, opened, staged


def test_a_squash_leaves_one_commit_with_the_same_version(hub: Hub, hub_store: HubStore) -> None:
    first = hub_store.publish("main", {"a": b"1", "b": b"\xff"}, expect=None)
    second = hub_store.publish("main", {"a": b"2"}, expect=first)
    head = hub_store.compact("main", second)
    assert len(HfApi(endpoint=hub.url).list_repo_commits(REPO)) == 1
    assert (head.nonce, head.files) == (second.nonce, second.files)
    assert head.id != second.id
    assert list(opened().history("main")) == [head]
    assert opened().lookup("main", second.nonce) == head
    with pytest.raises(Conflict):
        hub_store.publish("main", {"a": b"3"}, expect=second)


def test_a_read_goes_on_where_a_squash_took_its_commit_away(
    hub: Hub, hub_store: HubStore, tmp_path: Path
) -> None:
    version = hub_store.publish("main", {"a": b"1", "w": b"\xff"}, expect=None)
    reader = opened()
    assert reader.head() == version
    hub_store.compact("main", version)
    assert reader.read(version.ref("a")) == b"1"
    assert reader.fetch(version.ref("w"), tmp_path / "out").read_bytes() == b"\xff"
    assert reader.head() == hub_store.head()


def test_a_stager_finds_its_file_again_after_a_squash(
    hub: Hub, hub_store: HubStore, tmp_path: Path
) -> None:
    """Staged and published by this process, whose own copy is gone, then squashed by another."""
    ref = staged(hub_store, tmp_path, b"weights")
    version = hub_store.publish("main", {"w": ref}, expect=None)
    (tmp_path / "source").unlink()
    opened().compact("main", version)
    assert hub_store.read(ref) == b"weights"


def test_a_commit_that_lands_before_the_squash_is_kept(
    hub: Hub, hub_store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = hub_store.publish("main", {"a": b"1"}, expect=None)
    racer, squash = opened(), hub_store._repo.squash
    landed: list[Version] = []

    def late(branch: str, title: str) -> None:
        landed.append(racer.publish("main", {"a": b"2"}, expect=version))
        squash(branch, title)

    monkeypatch.setattr(hub_store._repo, "squash", late)
    with pytest.raises(Conflict, match="moved on"):
        hub_store.compact("main", version)
    head = opened().head()
    assert head is not None
    assert (head.nonce, head.files) == (landed[0].nonce, landed[0].files)


def test_a_squash_that_changes_a_file_is_told(
    hub: Hub, hub_store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = hub_store.publish("main", {"a": b"1", "b": b"2"}, expect=None)
    squash = hub_store._repo.squash

    def lossy(branch: str, title: str) -> None:
        lose = CommitOperationDelete("b")
        HfApi(endpoint=hub.url).create_commit(REPO, [lose], commit_message="lose b")
        squash(branch, title)

    monkeypatch.setattr(hub_store._repo, "squash", lossy)
    with pytest.raises(Corrupt, match="changed its files"):
        hub_store.compact("main", version)


def test_a_squash_whose_answer_is_lost_has_happened(hub: Hub, hub_store: HubStore) -> None:
    version = hub_store.publish("main", {"a": b"1"}, expect=None)
    hub.faults.add("squash", "drop_after")
    head = hub_store.compact("main", version)
    assert (head.nonce, head.id != version.id) == (version.nonce, True)


def test_a_squash_that_did_not_happen_is_asked_for_again(hub: Hub, hub_store: HubStore) -> None:
    version = hub_store.publish("main", {"a": b"1"}, expect=None)
    hub.faults.add("squash", "error", status=503)
    with pytest.raises(Busy):
        hub_store.compact("main", version)
    assert hub_store.compact("main", version).nonce == version.nonce
