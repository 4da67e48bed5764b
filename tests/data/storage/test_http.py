"""Files over HTTP: with how many requests, under which troubles, what an answer means."""

from __future__ import annotations

import hashlib
import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.data.storage import http, remote
from diffurefill.data.storage.files import Stream, list_files, open_file
from diffurefill.data.storage.listing import File
from diffurefill.data.storage.remote import open_remote
from tests.data.range_server import Faults, Refusal, serve
from tests.data.storage.reading import noise, read_all
from tests.data.storage.test_patience import FakeTime

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("no_connection_is_left")


def test_a_file_over_http_is_listed_and_read(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_bytes(content := noise(3 * MIB + 5))
    with serve(tmp_path) as server:
        url = server.url_of("a b.jsonl") + "?key=secret"
        assert list_files(url) == [File(url, "a b.jsonl", len(content))]
        file = open_file(url)
        assert file.uri == server.url_of("a b.jsonl")
        server.requests.clear()
        stream = io.BufferedReader(Stream(file), 8192)
        assert stream.read() == content
        assert server.ranges("a b.jsonl") == [(0, MIB), (MIB, 2 * MIB), (2 * MIB, 3 * MIB)]
        file.close()


def test_opening_brings_the_footer_with_it() -> None:
    with serve({"a": (content := noise(MIB))}) as server:
        file = open_remote(server.url_of("a"))
        assert file.read_at(MIB - 1000, 1000) == content[-1000:]
        assert [seen.span for seen in server.requests] == ["bytes=-65536"]


@pytest.mark.parametrize("size", [0, 1, 2, 65_535, 65_536, 65_537])
def test_files_about_as_long_as_the_first_request(size: int) -> None:
    with serve({"a": (content := noise(size))}) as server:
        assert read_all(open_remote(server.url_of("a")), 1000) == content


@pytest.mark.parametrize("size", [1, 2, 100_000])
def test_a_server_without_ranges_from_the_end(size: int) -> None:
    with serve({"a": (content := noise(size))}) as server:
        server.gives_suffixes = False
        assert read_all(open_remote(server.url_of("a")), 1000) == content


def test_a_server_without_ranges_is_refused() -> None:
    with serve({"a.txt": noise(100)}) as server:
        server.gives_ranges = False
        with pytest.raises(
            UserError, match=r"a\.txt: the server cannot send parts of a file; down"
        ):
            open_remote(server.url_of("a.txt"))
        assert len(server.requests) == 1


FAULTS = Faults(rate=0.2, seed=3)


def test_a_fifth_of_all_requests_going_wrong_changes_no_byte(
    tmp_path: Path, short_stalls: None
) -> None:
    """T6: 503s, 429s, cut and stalled bodies, resets, other ranges, whole files."""
    (tmp_path / "a").write_bytes(content := noise(6 * MIB))
    time = FakeTime()
    with serve(tmp_path, FAULTS) as server:
        file = open_remote(server.url_of("a"), time.patience)
        for start in range(0, file.size, 50_000):  # as many requests as reads
            file._window = remote._Window(0, b"")
            file._next = -1
            assert file.read_at(start, 50_000) == content[start : start + 50_000]
        faults = {seen.fault for seen in server.requests}
        assert faults == {None, *FAULTS.kinds}
        num_failed = sum(seen.fault is not None for seen in server.requests)
        assert len(time.slept) == num_failed
        assert 7.0 in time.slept  # Retry-After of a 429


def test_nine_files_at_once_under_faults(tmp_path: Path, short_stalls: None) -> None:
    contents = {f"{n}.bin": noise(2 * MIB, seed=n) for n in range(9)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    def digest(name: str) -> str:
        file = open_remote(server.url_of(name), FakeTime().patience)
        return hashlib.sha256(read_all(file, 70_000)).hexdigest()

    with serve(tmp_path, FAULTS) as server, ThreadPoolExecutor(9) as pool:
        found = list(pool.map(digest, contents))
        assert any(seen.fault for seen in server.requests)
    assert found == [hashlib.sha256(content).hexdigest() for content in contents.values()]


@pytest.mark.parametrize("kind", ["503", "408", "reset", "cut", "wrong_range", "whole"])
def test_trouble_that_stays_ends_after_a_quarter_of_an_hour(kind: str) -> None:
    time = FakeTime()
    with serve({"a": noise(100_000)}, Faults(rate=1.0, kinds=(kind,))) as server:
        with pytest.raises(UserError, match=r"/a cannot be reached: \d+ attempts in 15 min"):
            open_remote(server.url_of("a"), time.patience)
        assert time.now == pytest.approx(900.0)
        assert {seen.fault for seen in server.requests} == {kind}


def test_trouble_in_the_middle_is_repeated_at_the_same_place() -> None:
    time = FakeTime()
    with serve({"a": (content := noise(3 * MIB))}) as server:
        file = open_remote(server.url_of("a"), time.patience)
        server.next_faults.extend(["cut", "503", "reset"])
        assert file.read_at(0, 100) == content[:100]
        assert server.ranges("a") == [(0, MIB)] * 4
        assert len(time.slept) == 3


def test_no_server_at_all() -> None:
    time = FakeTime()
    with serve({}) as server:
        url = server.url_of("a")
    with pytest.raises(UserError, match=r"the last with: ConnectError \(.*refused"):
        open_remote(url, time.patience)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("404", r"/a does not exist \(404\): check the address"),
        ("410", r"does not exist \(410\)"),
        ("401", "the server answered 401: download the file with a login"),
        ("403", "the server answered 403: download the file with a login"),
        ("400", "the server answered 400: check the address"),
        ("204", "the server answered 204"),
    ],
)
def test_what_does_not_pass_fails_at_once(fault: str, message: str) -> None:
    time = FakeTime()
    with serve({"a": noise(3 * MIB)}) as server:
        server.next_faults.append(fault)
        with pytest.raises(UserError, match=message):
            open_remote(server.url_of("a"), time.patience)
        file = open_remote(server.url_of("a"), time.patience)
        server.next_faults.append(fault)
        with pytest.raises(UserError, match=message):
            file.read_at(0, 100)
    assert time.slept == []


@pytest.mark.parametrize("size", [0, 1000, MIB + 1000, 3 * MIB - 1, 3 * MIB + 1, 3 * MIB])
def test_a_file_that_changed_while_it_was_read_is_an_error(size: int) -> None:
    with serve({"a": noise(3 * MIB)}) as server:
        file = open_remote(server.url_of("a"), FakeTime().patience)
        file.read_at(0, 100)
        assert isinstance(server.files, dict)
        server.files["a"] = noise(size, seed=1)
        with pytest.raises(UserError, match=r"/a changed while it was read"):
            file.read_at(2 * MIB, 100)


def test_a_secret_in_an_address_is_in_no_message() -> None:
    with serve({"a": noise(100)}) as server:
        host = server.url.removeprefix("http://")
        url = f"http://user:pass-word@{host}/a?key=secret"
        for fault in ("404", "401", "503"):
            server.next_faults.extend([fault] * 2000)
            with pytest.raises(UserError) as caught:
                open_remote(url, FakeTime().patience)
            server.next_faults.clear()
            assert not re.search("pass-word|secret", str(caught.value))
        assert open_remote(url).uri == f"{server.url}/a"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://[::1/a", "an http address among the data sources is malformed"),
        ("http:///a", r"http:///a cannot be read \(UnsupportedProtocol\): check the address"),
        ("http://127.0.0.1:port/a", r":port/a cannot be read \(InvalidURL\): check the address"),
    ],
)
def test_an_impossible_address_is_refused(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_remote(url, FakeTime().patience)


# --- answers -------------------------------------------------------------------------------------

HALF_PAST = "Mon, 30 Nov 2026 10:30:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "120"}, 120.0),
        ({"Retry-After": HALF_PAST, "Date": "Mon, 30 Nov 2026 10:00:00 GMT"}, 1800.0),
        ({"Retry-After": HALF_PAST, "Date": "Mon, 30 Nov 2026 11:00:00 GMT"}, 0.0),
        ({"Retry-After": HALF_PAST}, 0.0),
        ({"Retry-After": "soon"}, 0.0),
        ({"RateLimit": '"resolvers";r=0;t=55'}, 56.0),
        ({"RateLimit": '"resolvers";r=12;t=55'}, 0.0),
        ({}, 0.0),
    ],
)  # fmt: skip
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float) -> None:
    assert http.asked_wait(headers) == seconds


def test_a_body_that_trickles_is_given_up() -> None:
    now = iter(range(0, 10_000, 20))
    with pytest.raises(http.Passing, match="too slowly"):
        http.read_body([b"x"] * 100, 100, lambda: float(next(now)))
    assert http.read_body([b"x"] * 100, 100, lambda: 0.0) == b"x" * 100


@pytest.mark.parametrize(("sent", "message"), [(99, "after 99 of 100"), (101, "sent more than")])
def test_a_body_of_another_length_is_not_used(sent: int, message: str) -> None:
    with pytest.raises(http.Passing, match=message):
        http.read_body([b"x"] * sent, 100)


def test_a_status_with_the_hub_s_headers_waits_as_long() -> None:
    time = FakeTime()
    with serve({"a": noise(10)}) as server:
        server.next_faults.append(Refusal(429, {"RateLimit": '"resolvers";r=0;t=99'}))
        assert open_remote(server.url_of("a"), time.patience).size == 10
    assert time.slept == [100.0]


# --- the server of the tests itself --------------------------------------------------------------


def test_faults_depend_on_the_seed_the_file_and_the_request_alone() -> None:
    faults = [Faults(0.5, 7).of("a", number) for number in range(400)]
    assert faults == [Faults(0.5, 7).of("a", number) for number in range(400)]
    assert faults != [Faults(0.5, 8).of("a", number) for number in range(400)]
    assert faults != [Faults(0.5, 7).of("b", number) for number in range(400)]
    assert 150 < sum(fault is not None for fault in faults) < 250
