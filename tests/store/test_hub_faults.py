"""A hub that fails: lost answers, locks, quotas, lag, damaged and stalled transfers.

Source: spec hf-endpoints.md 7 and hub.md A8.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest

from diffurefill.store import hub_client, hub_versions
from diffurefill.store.base import (
    MAX_DOUBTS,
    Busy,
    Conflict,
    Corrupt,
    Denied,
    Publication,
    Ref,
    Unknown,
    Version,
    publish_surely,
)
from diffurefill.store.hub import HubStore
from diffurefill.store.hub_client import RATE_LIMIT_PAUSE
from tests.hub_server import Hub
from tests.store.hub_helpers import URI, opened, staged

WEIGHTS = random.Random(3).randbytes(3 << 20)


@pytest.fixture
def first(hub_store: HubStore) -> Version:
    return hub_store.publish("main", {"n": b"1"}, expect=None)


@pytest.fixture
def weights(hub_store: HubStore, tmp_path: Path) -> Ref:
    """A published file that only the hub still has."""
    ref = staged(hub_store, tmp_path, WEIGHTS)
    hub_store.publish("w-00", {"weights": ref}, expect=None)
    (tmp_path / "source").unlink()
    return ref


def test_text_of_an_error_says_what_was_being_done(hub: Hub, hub_store: HubStore) -> None:
    hub.faults.add("refs", "error", status=503)
    with pytest.raises(Busy, match=r"hf://alice/run: the hub answered 503 while listing the bran"):
        hub_store.head()


def test_a_repository_made_a_moment_ago_is_waited_for(hub: Hub) -> None:
    hub.faults.add("commits", "error", status=404)
    with pytest.raises(Busy, match="first commit"):
        HubStore(URI, create=True)
    assert HubStore(URI, create=True).head() is None


# --- the commit ---


@pytest.mark.parametrize("action", ["error_after", "drop_after"])
def test_a_commit_that_landed_without_an_answer_is_found(
    hub: Hub, hub_store: HubStore, first: Version, action: str
) -> None:
    hub.faults.add("commit", action)
    with pytest.raises(Unknown):
        hub_store.publish("main", {"n": b"2"}, expect=first, nonce="mine")
    mine = hub_store.lookup("main", "mine")
    assert mine is not None
    assert hub_store.read(mine.ref("n")) == b"2"
    assert list(opened().history("main")) == [first, mine]


@pytest.mark.parametrize("action", ["error", "error_after", "drop", "drop_after"])
def test_a_lost_answer_is_settled_with_one_version(
    hub: Hub, hub_store: HubStore, first: Version, action: str
) -> None:
    hub.faults.add("commit", action, status=503)
    second = publish_surely(hub_store, "main", {"n": b"2"}, expect=first)
    assert list(opened().history("main")) == [first, second]


def test_a_commit_that_never_gets_an_answer_ends(
    hub: Hub, hub_store: HubStore, first: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hub_client.TIME_LIMITS, "read", 0.2)
    hub.faults.add("commit", "hang_after")
    with pytest.raises(Unknown, match="ReadTimeout"):
        hub_store.publish("main", {"n": b"2"}, expect=first, nonce="mine")
    assert hub_store.lookup("main", "mine") is not None


def test_a_refusal_that_is_ones_own_success_is_recognised(
    hub: Hub, hub_store: HubStore, first: Version
) -> None:
    """500 although it landed; then 412, because the head is what the first request made it."""
    hub.faults.add("commit", "error_after")
    with pytest.raises(Unknown):
        hub_store.publish("main", {"n": b"2"}, expect=first, nonce="mine")
    with pytest.raises(Conflict):
        hub_store.publish("main", {"n": b"2"}, expect=first, nonce="mine")
    mine = hub_store.lookup("main", "mine")
    assert mine is not None
    assert mine == opened().head()


def test_a_commit_lock_is_waited_for(hub: Hub, hub_store: HubStore, first: Version) -> None:
    hub.faults.add("commit", "locked")
    with pytest.raises(Busy) as busy:
        hub_store.publish("main", {"n": b"2"}, expect=first)
    assert busy.value.retry_after > 0
    assert opened().head() == first
    hub_store.publish("main", {"n": b"2"}, expect=first)


@pytest.mark.parametrize(
    ("action", "seconds"), [("rate_limited", 8.0), ("hourly_limit", RATE_LIMIT_PAUSE)]
)
def test_a_rate_limit_says_for_how_long(
    hub: Hub, hub_store: HubStore, first: Version, action: str, seconds: float
) -> None:
    hub.faults.add("commit", action, seconds=7)
    with pytest.raises(Busy) as busy:
        hub_store.publish("main", {"n": b"2"}, expect=first)
    assert busy.value.retry_after == seconds


def test_an_hours_commits_are_waited_for_not_fought_over(hub: Hub, hub_store: HubStore) -> None:
    hub.configure(commits_per_hour=1)
    first = hub_store.publish("main", {"n": b"1"}, expect=None)
    with pytest.raises(Busy):
        hub_store.publish("main", {"n": b"2"}, expect=first)
    hub.advance_clock(3601)
    hub_store.publish("main", {"n": b"2"}, expect=first)


def test_a_refusal_for_ever_is_given_up(hub: Hub, hub_store: HubStore, first: Version) -> None:
    """412 with the right parent, whatever is tried: a token that may only open pull requests."""
    hub.faults.add("commit", "conflict", times=None)
    publication = Publication(hub_store, "main", {"n": b"2"}, expect=first)
    for _ in range(MAX_DOUBTS - 1):
        with pytest.raises(Busy):
            publication.attempt()
    with pytest.raises(Denied, match="token"):
        publication.attempt()
    assert hub.count("commit") == 1 + MAX_DOUBTS


@pytest.mark.parametrize("action", ["unauthorized", "forbidden", "storage_full"])
def test_a_refusal_that_lasts_is_denied(
    hub: Hub, hub_store: HubStore, first: Version, action: str
) -> None:
    hub.faults.add("commit", action)
    with pytest.raises(Denied, match="HF_TOKEN"):
        hub_store.publish("main", {"n": b"2"}, expect=first)


def test_a_hub_that_is_gone_publishes_nothing_for_sure(
    hub: Hub, hub_store: HubStore, first: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even a connection was made, nothing can have landed."""
    monkeypatch.setattr(hub_store._repo._api, "endpoint", "http://127.0.0.1:1")
    with pytest.raises(Busy, match="ConnectError"):
        hub_store.publish("main", {"n": b"2"}, expect=first)
    with pytest.raises(Busy, match="ConnectError"):
        hub_store.head()


# --- lag ---


def test_a_lagging_head_does_not_take_a_process_back(
    hub: Hub, hub_store: HubStore, first: Version
) -> None:
    second = hub_store.publish("main", {"n": b"2"}, expect=first)
    hub.faults.add("refs", "stale", times=None)
    assert hub_store.head() == second
    assert hub_store.poll(["main"]) == {"main": second.id}
    third = hub_store.publish("main", {"n": b"3"}, expect=second)
    assert hub_store.head() == third


def test_a_head_known_to_be_overtaken_is_not_opened_again(
    hub: Hub, hub_store: HubStore, first: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a squash it could not be: the lagging answer names a commit that is gone."""
    monkeypatch.setattr(hub_versions, "MAX_VERSIONS", 1)
    second = hub_store.publish("main", {"n": b"2"}, expect=first)
    hub.faults.add("refs", "stale")
    hub.clear_log()
    assert hub_store.head() == second
    assert [record["kind"] for record in hub.log()] == ["refs"]


def test_an_older_version_never_seen_before_is_known_by_its_number(
    hub: Hub, hub_store: HubStore, first: Version
) -> None:
    """This process has seen the newest version only; the answer goes back behind that."""
    hub_store.publish("main", {"n": b"2"}, expect=first)
    other = opened()
    newest = other.head()
    hub.faults.add("refs", "stale", times=2)
    assert other.head() == newest
    assert other.head() == newest


def test_a_publish_upon_a_lagging_head_conflicts(
    hub: Hub, hub_store: HubStore, first: Version
) -> None:
    second = hub_store.publish("main", {"n": b"2"}, expect=first)
    hub.faults.add("refs", "stale", times=2)
    other = opened()
    assert other.head() == first
    with pytest.raises(Conflict):
        other.publish("main", {"n": b"3"}, expect=first)
    assert other.head() == second


def test_a_lookup_asks_a_second_source_when_the_head_lags(
    hub: Hub, hub_store: HubStore, first: Version
) -> None:
    hub.faults.add("commit", "error_after")
    hub.faults.add("refs", "stale", times=None)
    second = publish_surely(hub_store, "main", {"n": b"2"}, expect=first)
    assert hub_store.head() == second
    assert hub.count("commit") == 2


# --- reading ---


def test_a_passing_error_of_a_read_is_busy_and_never_an_older_file(
    hub: Hub, hub_store: HubStore, weights: Ref, tmp_path: Path
) -> None:
    for kind, action in (("resolve", "error"), ("blob", "error"), ("resolve", "drop")):
        hub.faults.add(kind, action, status=503)
        with pytest.raises(Busy):
            hub_store.fetch(weights, tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []
    assert hub_store.fetch(weights, tmp_path / "out").read_bytes() == WEIGHTS


@pytest.mark.parametrize("action", ["flip", "truncate"])
def test_a_damaged_file_is_fetched_once_more(
    hub: Hub, hub_store: HubStore, weights: Ref, tmp_path: Path, action: str
) -> None:
    hub.faults.add("blob", action)
    assert hub_store.fetch(weights, tmp_path / "out").read_bytes() == WEIGHTS
    hub.faults.add("blob", action, times=2)
    with pytest.raises(Corrupt, match="weights"):
        hub_store.fetch(weights, tmp_path / "other")
    assert list(tmp_path.glob("*other*")) == []


def test_a_damaged_small_file_and_manifest_are_read_once_more(
    hub: Hub, hub_store: HubStore, first: Version
) -> None:
    hub.faults.add("resolve", "flip")
    assert hub_store.read(first.ref("n")) == b"1"
    hub.faults.add("resolve", "flip", match="version.json")
    assert opened().head() == first
    hub.faults.add("resolve", "flip", match="version.json", times=2)
    with pytest.raises(Corrupt, match="not a manifest"):
        opened().head()


class Counting(io.BytesIO):
    written = 0

    def write(self, data: Any) -> int:
        self.written += len(data)
        return super().write(data)


def test_a_broken_download_goes_on_where_it_broke(
    hub: Hub, hub_store: HubStore, weights: Ref, tmp_path: Path
) -> None:
    hub.faults.add("blob", "cut", times=3)
    assert hub_store.fetch(weights, tmp_path / "out").read_bytes() == WEIGHTS
    assert hub.count("blob") == 4
    version, f = hub_store.head("w-00"), Counting()
    assert version is not None
    hub.faults.add("blob", "cut", times=3)
    assert hub_store._repo.download(version.id, "weights", f, weights.size) == weights
    assert f.written == weights.size  # each byte came once


def test_a_stalled_download_ends(
    hub: Hub,
    hub_store: HubStore,
    weights: Ref,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(hub_client.TIME_LIMITS, "read", 0.2)
    hub.faults.add("blob", "stall")
    assert hub_store.fetch(weights, tmp_path / "out").read_bytes() == WEIGHTS
    hub.faults.add("blob", "hang")
    with pytest.raises(Busy, match="ReadTimeout"):
        hub_store.fetch(weights, tmp_path / "other")


def test_a_download_that_trickles_ends(
    hub: Hub,
    hub_store: HubStore,
    weights: Ref,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_client, "longest_transfer", lambda size: 0.0)
    with pytest.raises(Busy):
        hub_store.fetch(weights, tmp_path / "out")


def test_a_request_that_never_gets_an_answer_ends(
    hub: Hub, hub_store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks for no time limit here."""
    monkeypatch.setitem(hub_client.TIME_LIMITS, "read", 0.2)
    hub.faults.add("refs", "hang")
    with pytest.raises(Busy, match="ReadTimeout"):
        hub_store.head()
