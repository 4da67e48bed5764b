"""The same store on the live hub, for a person with a token and a repository to spare.

    DIFFUREFILL_HUB_RUN=hf://user/scratch HF_TOKEN=hf_... pytest -m hub --force-enable-socket

About a dozen commits. It shows what no test server can: real locks, quotas, lag and Xet.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from diffurefill.store.base import Conflict, new_nonce
from diffurefill.store.hub import HubStore

pytestmark = [
    pytest.mark.hub,
    # The client's own way of sending a file through LFS.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


def test_a_round_trip_on_the_live_hub(tmp_path: Path) -> None:
    uri = os.environ.get("DIFFUREFILL_HUB_RUN")
    if uri is None:
        pytest.skip("set DIFFUREFILL_HUB_RUN to hf://user/repo, and HF_TOKEN")
    store = HubStore(uri, create=True)
    store.check_access()
    store.selftest()
    lane = f"w-{new_nonce()[:8]}"  # the repository may have been used before
    source = tmp_path / "source"
    source.write_bytes(random.randbytes(20 << 20))
    weights = store.stage(source)
    try:
        first = store.publish(lane, {"weights": weights, "n": b"1"}, expect=None)
        second = store.publish(lane, {"n": b"2"}, expect=first)
        with pytest.raises(Conflict):
            store.publish(lane, {"n": b"3"}, expect=first)
        head = store.compact(lane, second)
        other = HubStore(uri, create=False)
        assert other.head(lane) == head
        assert other.lookup(lane, second.nonce) == head
        fetched = other.fetch(head.ref("weights"), tmp_path / "out")
        assert fetched.read_bytes() == source.read_bytes()
    finally:
        store._repo.delete_branch(lane)
