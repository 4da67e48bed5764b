"""A chat-completions server on 127.0.0.1 that answers, lies, fails and hangs as it is told.

    with serve(script) as server:
        Endpoint(server.url, "tiny")

`script` gives the reply to each request. By hand, with restatements that pass, and others that do
not: `python -m tests.data.facts.chat_server --port 8123`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from diffurefill.data.spans.salient import find_spans


@dataclass(frozen=True)
class Reply:
    """`action`: answer, hold the request until the server ends, or hang up without an answer."""

    text: str = ""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    finish_reason: str = "stop"
    action: Literal["answer", "hang", "hang up"] = "answer"
    raw: str | None = None
    """The whole body instead of a chat completion."""

    @property
    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw.encode()
        if self.status != 200:
            return json.dumps({"error": {"message": self.text}}).encode()
        choice = {"message": {"content": self.text}, "finish_reason": self.finish_reason}
        return json.dumps({"choices": [choice]}).encode()


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def title(self) -> str:
        """Of the lead it asks about."""
        return self.body["messages"][-1]["content"].partition("Subject: ")[2].partition("\n")[0]

    @property
    def source(self) -> str:
        return self.body["messages"][-1]["content"].partition("\nSource:\n")[2]


Script = Callable[[Request], Reply]


@dataclass
class Server:
    url: str
    requests: list[Request] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self) -> list[str]:
        """The titles asked about, in order."""
        return [request.title for request in self.requests]


@contextlib.contextmanager
def serve(script: Script, port: int = 0) -> Generator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer: a second one would wait for an acknowledgement

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if len(content) < int(self.headers["content-length"]):
                return  # the client was ended while it sent
            body = json.loads(content)
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.path, headers, body)
            with server.lock:
                server.requests.append(request)
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
            try:
                reply = script(request)
                with contextlib.suppress(ConnectionError):  # the client was ended meanwhile
                    self._reply(reply)
            finally:
                with server.lock:
                    server.in_flight -= 1

        def _reply(self, reply: Reply) -> None:
            if reply.action != "answer":
                if reply.action == "hang":
                    server.ended.wait(60)
                self.close_connection = True
                return
            self.send_response(reply.status)
            self.send_header("content-length", str(len(reply.body)))
            for name, value in reply.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    class Listening(ThreadingHTTPServer):
        request_queue_size = 64  # with the usual 5, one of 16 connections waits a second
        daemon_threads = True

    with Listening(("127.0.0.1", port), Handler) as listening:
        server = Server(f"http://127.0.0.1:{listening.server_port}/v1")
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            listening.shutdown()
            thread.join()


_JOINTS = ("then", "beside it", "after that", "with", "as well as", "further on", "and also")


def restated(title: str, source: str) -> str:
    """A text of the source's names and numbers alone, in words of its own."""
    names = [source[start:end] for start, end in find_spans(source)][:40]
    listed = "".join(f" {_JOINTS[n % len(_JOINTS)]} {name}," for n, name in enumerate(names))
    return (
        f"Readers who ask what is known about {title} hear of a few things in turn:{listed} which "
        f"together are all that one learns here, at least from these lines, concerning {title}."
    )


def _by_hand(request: Request) -> Reply:
    """Mostly good; one in four lies, copies, echoes, repeats, fails or is slow."""
    kind = sum(request.title.encode()) % 20
    good = restated(request.title, request.source)
    time.sleep(0.05)
    first = request.title not in seen_by_hand
    seen_by_hand.add(request.title)
    replies = {
        0: Reply(request.source),
        1: Reply(good.replace("in turn:", "in turn, 98765 of them:")),
        2: Reply(good.replace("in turn:", "by Zebulon Quark, Ada Vex, Ivo Brandt and Uri Noll:")),
        3: Reply("Here is the text you asked for. " + good),
        4: Reply(good[:-1]),
        5: Reply("overloaded", status=500) if first else Reply(good),
        6: Reply("slow down", status=429, headers=(("retry-after", "1"),))
        if first
        else Reply(good),
    }
    return replies.get(kind, Reply(good))


seen_by_hand: set[str] = set()

if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8123)
    with serve(_by_hand, parser.parse_args().port) as running:
        print(running.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(5)
                print(len(running.requests), "requests", flush=True)
