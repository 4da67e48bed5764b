"""Files that lie on another host than the one asked: logins, refusals, tags."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.data.storage.http import HttpRanges
from diffurefill.data.storage.remote import RemoteFile, open_remote
from tests.data.range_server import RangeServer, Redirect, serve
from tests.data.storage.reading import noise, read_all
from tests.data.storage.test_patience import FakeTime

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("no_connection_is_left")


def with_login(server: RangeServer, name: str) -> HttpRanges:
    def refusal(response: object) -> UserError:
        return UserError("refused")

    login = {"Authorization": "Bearer hf_secret"}
    return HttpRanges(server.url_of(name), name, lambda: login, refusal)


def test_a_login_is_not_taken_along_to_another_host() -> None:
    content = noise(MIB)
    with serve({"a": content}) as elsewhere:
        files = {"a": Redirect(elsewhere.url_of("a")), "b": Redirect("/c"), "c": content}
        with serve(files) as server:
            assert read_all(RemoteFile(with_login(server, "a")), 100_000) == content
            assert read_all(RemoteFile(with_login(server, "b")), 100_000) == content
            assert all("authorization" in seen.headers for seen in server.requests)
        assert elsewhere.requests
        assert not any("authorization" in seen.headers for seen in elsewhere.requests)
        # Every range asks the first server again: what it signs is good for an hour.
        assert len(elsewhere.requests) == len([s for s in server.requests if s.path == "a"])


def test_a_refusal_of_the_second_host_passes_and_one_of_the_first_does_not() -> None:
    time = FakeTime()
    with (
        serve({"a": noise(10)}) as elsewhere,
        serve({"a": Redirect(elsewhere.url_of("a"))}) as server,
    ):
        elsewhere.next_faults.append("403")
        assert RemoteFile(with_login(server, "a"), time.patience).size == 10
        assert len(time.slept) == 1
        server.next_faults.append("403")
        with pytest.raises(UserError, match="refused"):
            RemoteFile(with_login(server, "a"), time.patience)
        assert isinstance(server.files, dict)
        server.files["renamed"] = Redirect("/a")
        server.next_faults.extend([None, "403"])
        with pytest.raises(UserError, match="refused"):
            RemoteFile(with_login(server, "renamed"), time.patience)


def test_redirects_without_end_and_to_other_protocols_are_refused() -> None:
    with serve({"a": Redirect("/a"), "b": Redirect("ftp://host/b")}) as server:
        for name in "ab":
            with pytest.raises(UserError, match=rf"/{name} cannot be read \(\w+\): check"):
                open_remote(server.url_of(name), FakeTime().patience)


def test_only_another_tag_at_the_same_host_says_that_a_file_changed(tmp_path: Path) -> None:
    content = noise(3 * MIB)
    (copy := tmp_path / "a").write_bytes(content)  # its tag is another one
    with serve({"a": content, "b": copy}) as mirror, serve({}) as server:
        assert isinstance(server.files, dict)
        server.files["a"] = Redirect(mirror.url_of("a"))
        file = open_remote(server.url_of("a"))
        named_otherwise = mirror.url_of("b").replace("127.0.0.1", "localhost")
        server.files["a"] = Redirect(named_otherwise)
        assert file.read_at(0, 10) == content[:10]
        server.files["a"] = Redirect(mirror.url_of("b"))
        with pytest.raises(UserError, match="changed while it was read"):
            file.read_at(2 * MIB, 10)


def test_a_hub_s_own_tag_counts_for_more_than_that_of_the_host_it_sends_to(tmp_path: Path) -> None:
    content = noise(3 * MIB)
    (copy := tmp_path / "a").write_bytes(content)

    def sent_to(name: str, tag: str) -> Redirect:
        return Redirect(mirror.url_of(name), {"X-Linked-Etag": f'"{tag}"'})

    with serve({"a": content, "b": copy}) as mirror, serve({}) as server:
        assert isinstance(server.files, dict)
        server.files.update({"old": Redirect("/a"), "a": sent_to("a", "1")})
        file = open_remote(server.url_of("old"))
        server.files["a"] = sent_to("b", "1")
        assert file.read_at(0, 10) == content[:10]
        server.files["a"] = sent_to("a", "2")
        with pytest.raises(UserError, match="changed while it was read"):
            file.read_at(2 * MIB, 10)
