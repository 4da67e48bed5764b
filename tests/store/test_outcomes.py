"""Doubt about a publish or a compaction, on a store whose answers lag or are lost."""

from typing import Any

import pytest

from diffurefill.store.base import (
    MAX_DOUBTS,
    Busy,
    Conflict,
    Denied,
    Publication,
    Unknown,
    Version,
    compact_surely,
)
from tests.store.memory import MemoryStore


class Lying(MemoryStore):
    """Publishes land and their answers are lost; lookups lag behind while `lags`."""

    lags = True

    def publish(self, *args: Any, **kwargs: Any) -> Version:
        super().publish(*args, **kwargs)
        raise Unknown("the answer was lost")

    def lookup(self, lane: str, nonce: str) -> Version | None:
        return None if self.lags else super().lookup(lane, nonce)


def test_our_own_version_at_the_head_is_recognised_when_the_lookup_lags() -> None:
    store = Lying()
    version = Publication(store, "main", {"a": b"1"}, expect=None).attempt()
    assert version == store.head("main")


class Refusing(MemoryStore):
    """Says Conflict although nobody else has written, as hubs do to tokens without the right."""

    def publish(self, *args: Any, **kwargs: Any) -> Version:
        raise Conflict("412")


def test_a_store_that_refuses_for_ever_is_given_up_with_advice() -> None:
    publication = Publication(Refusing(), "main", {"a": b"1"}, expect=None)
    for _ in range(MAX_DOUBTS - 1):
        with pytest.raises(Busy):
            publication.attempt()
    with pytest.raises(Denied, match="may write"):
        publication.attempt()


def test_every_attempt_carries_the_same_nonce() -> None:
    class Down(MemoryStore):
        nonces: list[str] = []  # noqa: RUF012

        def publish(self, *args: Any, nonce: str | None = None, **kwargs: Any) -> Version:
            self.nonces.append(str(nonce))
            raise Unknown("down")

    store = Down()
    publication = Publication(store, "main", {}, expect=None)
    for _ in range(3):
        with pytest.raises(Busy):
            publication.attempt()
    assert store.nonces == [publication.nonce] * 3


def test_a_compaction_whose_answer_was_lost_is_recognised_as_ours() -> None:
    class Squashing(MemoryStore):
        """Every version gets a new id, as a squash gives it."""

        def compact(self, lane: str, expect: Version) -> Version:
            if self.versions[lane][-1].id != expect.id:
                raise Conflict("moved")
            head = Version(lane, "squashed", expect.nonce, expect.files)
            self.versions[lane] = [head]
            raise Busy("the answer was lost", 1.0)

    store = Squashing()
    first = store.publish("main", {"a": b"1"}, expect=None)
    with pytest.raises(Busy):
        compact_surely(store, "main", first)
    assert compact_surely(store, "main", first).id == "squashed"
    with pytest.raises(Conflict):
        compact_surely(store, "main", Version("main", "1", "another", {}))
