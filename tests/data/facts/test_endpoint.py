"""What is tried again, what stops, and what is never said."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest

from diffurefill.config import UserError
from diffurefill.data.facts.endpoint import (
    Answer,
    ChatClient,
    Endpoint,
    GaveUp,
    key_from_environment,
)
from tests.data.facts.chat_server import Reply, Request, serve

HELLO = [{"role": "user", "content": "Hello"}]
KEY = "sk-very-secret"


def ask(endpoint: Endpoint, said: list[str] | None = None) -> tuple[Answer, list[float]]:
    """The answer, and the waits between the tries."""
    waits: list[float] = []
    said = [] if said is None else said

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> Answer:
        async with ChatClient(endpoint, 2, said.append, sleep) as client:
            return await client.ask(HELLO, max_tokens=5, temperature=0.5, seed=7)

    return asyncio.run(run()), waits


def first(*troubles: Reply) -> Callable[[Request], Reply]:
    """Troubles in turn, then an answer."""
    left = list(troubles)
    return lambda request: left.pop(0) if left else Reply("Hi.")


def test_what_is_sent_and_what_comes_back():
    with serve(lambda request: Reply("Hi.", finish_reason="length")) as server:
        answer, waits = ask(Endpoint(server.url + "/", "tiny", KEY))
    assert (answer, waits) == (Answer("Hi.", "length"), [])
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.body == {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 7,
    }


def test_without_a_key_none_is_sent():
    with serve(first()) as server:
        ask(Endpoint(server.url, "tiny"))
    assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    "trouble",
    [
        *(Reply("busy", status=status) for status in (408, 409, 425, 429, 500, 502, 503, 504)),
        Reply(action="hang up"),
        Reply(raw="<html>a gateway</html>"),
        Reply(raw='{"choices": []}'),
        Reply(raw='{"choices": [{"message": {"content": 5}}]}'),
    ],
)
def test_what_may_pass_is_tried_again_after_growing_waits(trouble: Reply):
    with serve(first(trouble, trouble, trouble)) as server:
        answer, waits = ask(Endpoint(server.url, "tiny"))
    assert answer.text == "Hi."
    assert len(server.requests) == 4
    assert [0.5 <= wait / 2**n < 1.5 for n, wait in enumerate(waits)] == [True] * 3


def test_only_the_first_trouble_is_reported():
    said: list[str] = []
    with serve(first(Reply("busy", status=503), Reply("gone", status=500))) as server:
        ask(Endpoint(server.url, "tiny"), said)
    assert said == ["the endpoint gives no answer (HTTP 503: busy); trying again"]


def test_a_server_that_hangs_is_left_and_asked_again():
    with serve(first(Reply(action="hang"))) as server:
        answer, waits = ask(Endpoint(server.url, "tiny", timeout_seconds=0.2))
    assert (answer.text, len(waits)) == ("Hi.", 1)


def test_the_server_may_ask_for_a_longer_wait():
    def busy(seconds: str) -> Reply:
        return Reply("busy", status=429, headers=(("retry-after", seconds),))

    with serve(first(busy("40"), busy("Wed, 21 Oct 2026 07:28:00 GMT"), busy("9999999"))) as server:
        _, waits = ask(Endpoint(server.url, "tiny"))
    assert (waits[0], waits[1] < 3, waits[2]) == (40.0, True, 300.0)


def test_an_answer_without_text_is_an_empty_one_and_half_characters_are_replaced():
    empty = json.dumps({"choices": [{"message": {"content": None}, "finish_reason": "stop"}]})
    with serve(first(Reply(raw=empty), Reply("a\ud800b"))) as server:
        assert ask(Endpoint(server.url, "tiny"))[0] == Answer("", "stop")
        assert ask(Endpoint(server.url, "tiny"))[0].text == "a?b"


def test_a_question_is_given_up_after_its_tries():
    with (
        serve(lambda request: Reply("still busy", status=503)) as server,
        pytest.raises(GaveUp, match="HTTP 503: still busy"),
    ):
        ask(Endpoint(server.url, "tiny", tries=3))
    assert len(server.requests) == 3


def test_a_question_that_is_refused_is_not_asked_again():
    with (
        serve(lambda request: Reply("context too long", status=400)) as server,
        pytest.raises(GaveUp, match="HTTP 400: context too long"),
    ):
        ask(Endpoint(server.url, "tiny"))
    assert len(server.requests) == 1


def test_nobody_listening_is_trouble_too():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(GaveUp, match="ConnectError"):
        ask(Endpoint(url, "tiny", tries=2))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(f"bad key {KEY}", status=401), r"refuses the key \(HTTP 401.*--key-variable"),
        (Reply("not yours", status=403), r"refuses the key \(HTTP 403"),
        (Reply("Not Found", status=404), r"nothing answers at http.*usually ends in /v1"),
        (Reply("The model `tiny` does not exist.", status=404), r"no model 'tiny'.*--model"),
        (Reply(raw='{"error": {"code": "model_not_found"}}', status=400), r"no model 'tiny'"),
        (Reply(raw='{"detail": "model tiny not found"}', status=400), r"no model 'tiny'"),
        (Reply(raw='{"error": {"code": "insufficient_quota"}}', status=429), "no quota left"),
    ],
)
def test_what_will_never_pass_stops_at_once_with_what_to_do(reply: Reply, message: str):
    with serve(lambda request: reply) as server, pytest.raises(UserError, match=message) as error:
        ask(Endpoint(server.url, "tiny", KEY))
    assert len(server.requests) == 1
    assert KEY not in str(error.value)


def test_the_key_shows_nowhere():
    assert KEY not in repr(Endpoint("http://a/v1", "tiny", KEY))
    with (
        serve(lambda request: Reply(f"no {KEY}", status=400)) as server,
        pytest.raises(GaveUp, match=r"no \[key\]"),
    ):
        ask(Endpoint(server.url, "tiny", KEY))


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FACTS_KEY", f" {KEY}\n")
    assert key_from_environment("FACTS_KEY") == KEY
    assert key_from_environment(None) is None
    monkeypatch.setenv("FACTS_KEY", "")
    with pytest.raises(UserError, match="the environment variable FACTS_KEY holds no key"):
        key_from_environment("FACTS_KEY")


def test_an_endpoint_is_a_web_address():
    with pytest.raises(UserError, match="no web address"):
        Endpoint("127.0.0.1:8000", "tiny")
