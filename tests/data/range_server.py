"""A file server on 127.0.0.1 that gives ranges, and goes wrong where it is told to.

    with serve(folder, Faults(rate=0.2, seed=1)) as server:
        open_file(server.url_of("a.parquet"))

For a bench, whose own memory is measured, as a process of its own (put the repository's root on
sys.path first): `with spawned(folder, latency=0.04) as url`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from diffurefill.runtime import philox

ROOT = Path(__file__).resolve().parents[2]

KINDS = ("503", "429", "cut", "stall", "reset", "wrong_range", "whole")
"""A status; half of the body, then the connection's end, or nothing more; the connection reset
before any answer; another part than was asked for; the whole file instead of a part."""


@dataclass(frozen=True)
class Faults:
    """Each request goes wrong with probability `rate`, in one of `kinds`, drawn by `seed`, the
    file and how often it was asked for: threads in another order change nothing."""

    rate: float = 0.0
    seed: int = 0
    kinds: tuple[str, ...] = KINDS

    def of(self, path: str, number: int) -> str | None:
        draw = philox("fault", self.seed, path, number)
        return str(draw.choice(self.kinds)) if draw.random() < self.rate else None


@dataclass(frozen=True)
class Redirect:
    """Stands for a file that lies elsewhere."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """An answer without the file."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


Content = bytes | Path | Redirect


@dataclass
class Seen:
    """One request. `span` is its Range header; `fault` what was done to it, if anything."""

    method: str
    path: str
    span: str | None
    headers: dict[str, str]
    fault: str | None = None


class RangeServer:
    """`files` may be changed while it runs. `next_faults` are used up before any are drawn.

    None among them lets a request pass. `gives_ranges` False: every answer is the whole file, and
    says nothing of ranges; `gives_suffixes` False: so is a range counted from the end.
    """

    def __init__(
        self, files: Path | Mapping[str, Content], faults: Faults, latency: float = 0.0
    ) -> None:
        self.files: Path | dict[str, Content] = files if isinstance(files, Path) else dict(files)
        self.faults, self.latency = faults, latency
        self.next_faults: deque[str | Refusal | None] = deque()
        self.gives_ranges = self.gives_suffixes = self.gives_tags = True
        self.requests: list[Seen] = []
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", 0), _handler_for(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def url_of(self, name: str) -> str:
        return f"{self.url}/{quote(name)}"

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """(first byte, end) of every range asked of a file; those from the end are left out."""
        spans = [seen.span or "" for seen in self.requests if seen.path == name]
        found = [re.fullmatch(r"bytes=(\d+)-(\d+)", span) for span in spans]
        return [(int(m[1]), int(m[2]) + 1) for m in found if m]

    def content(self, name: str) -> Content | None:
        if isinstance(self.files, dict):
            return self.files.get(name)
        path = (self.files / name).resolve()
        inside = path.is_relative_to(self.files.resolve())
        return path if inside and path.is_file() else None

    def note(self, seen: Seen) -> str | Refusal | None:
        """Keeps the request; the fault that it meets."""
        with self._lock:
            self.requests.append(seen)
            number = self._numbers[seen.path]
            self._numbers[seen.path] += 1
            told = self.next_faults.popleft() if self.next_faults else None
        fault = told or self.faults.of(seen.path, number)
        seen.fault = fault if isinstance(fault, str) else fault and str(fault.status)
        return fault

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def serve(
    files: Path | Mapping[str, Content], faults: Faults | None = None, latency: float = 0.0
) -> Generator[RangeServer]:
    """A folder, or names with contents, in a thread of this process. `latency`: seconds before
    each answer."""
    server = RangeServer(files, faults or Faults(), latency)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def spawned(folder: Path, *, latency: float = 0.0, rate: float = 0.0, seed: int = 0) -> Generator:
    """The URL of a server with `folder`, in a process that ends with this one."""
    command = [sys.executable, "-m", "tests.data.range_server", str(folder)]
    command += ["--latency", str(latency), "--rate", str(rate), "--seed", str(seed)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(timeout=20)
        process.stdout.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # more connections at once would wait a second to try again


# --- one request ---------------------------------------------------------------------------------


def _handler_for(server: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0].removeprefix("/"))
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = Seen(self.command, path, headers.get("range"), headers)
            fault = server.note(seen)
            if server.latency:
                threading.Event().wait(server.latency)
            with contextlib.suppress(ConnectionError):  # the client has gone
                _answer(self, server, seen, fault)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    return Handler


def _answer(
    handler: BaseHTTPRequestHandler, server: RangeServer, seen: Seen, fault: str | Refusal | None
) -> None:
    content = server.content(seen.path)
    if isinstance(fault, str) and fault.isdigit():
        fault = Refusal(int(fault), {"Retry-After": "7"} if fault == "429" else {})
    if fault == "reset":
        return _reset(handler)
    if isinstance(fault, Refusal):
        return _empty(handler, fault.status, fault.headers)
    if content is None:
        return _empty(handler, 404, {})
    if isinstance(content, Redirect):
        return _empty(handler, 302, {"Location": content.url, **content.headers})
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    headers = {"ETag": _tag(content)} if server.gives_tags else {}
    span = _span(seen.span, size) if server.gives_ranges and fault != "whole" else (0, size)
    is_suffix = (seen.span or "").startswith("bytes=-")
    if span is None:
        return _empty(handler, 416, {"Content-Range": f"bytes */{size}"})
    if server.gives_ranges:
        headers["Accept-Ranges"] = "bytes"
    if fault == "wrong_range":
        span = _shifted(*span, size)
    if seen.span is None or not server.gives_ranges or fault == "whole":
        status = 200
    elif is_suffix and not server.gives_suffixes:
        span, status = (0, size), 200
    else:
        status = 206
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(span[1] - span[0])}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if seen.method == "GET":
        _send_body(handler, content, *span, fault)
    return None


def _send_body(
    handler: BaseHTTPRequestHandler, content: bytes | Path, start: int, end: int, fault: object
) -> None:
    if fault in ("cut", "stall"):
        end = (start + end) // 2
    if isinstance(content, Path):
        with content.open("rb") as file:  # by the kernel, a page at a time
            if end > start:
                handler.connection.sendfile(file, start, end - start)
    else:
        handler.wfile.write(memoryview(content)[start:end])
    if fault == "stall":
        handler.connection.settimeout(30.0)
        with contextlib.suppress(TimeoutError):
            handler.connection.recv(1)  # until the client has had enough
    if fault in ("cut", "stall"):
        handler.close_connection = True


def _empty(handler: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str]) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": "0"}.items():
        handler.send_header(name, value)
    handler.end_headers()


def _reset(handler: BaseHTTPRequestHandler) -> None:
    """Without the usual good-bye: the client sees its connection reset."""
    handler.close_connection = True
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    socket.close(handler.connection.detach())


def _span(asked: str | None, size: int) -> tuple[int, int] | None:
    """(first byte, end) of a single range, the whole without one; None where it holds nothing."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked or "")
    if found is None:
        return 0, size
    if not found[1]:
        return (max(size - int(found[2]), 0), size) if size else None
    start, end = int(found[1]), min(int(found[2] or size) + 1, size)
    return (start, end) if start < end else None


def _shifted(start: int, end: int, size: int) -> tuple[int, int]:
    """As many bytes of another place, or fewer where the file has no other place."""
    if start > 0:
        return start - 1, end - 1
    return (start + 1, end + 1) if end < size else (start, max(end - 1, 1))


@functools.lru_cache(maxsize=32)
def _digest(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def _tag(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return f'"{_digest(content)}"'
    stat = content.stat()
    return f'"{stat.st_size:x}-{stat.st_mtime_ns:x}"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--rate", type=float, default=0.0, help="share of requests that go wrong")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with serve(args.folder, Faults(args.rate, args.seed), args.latency) as server:
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()


if __name__ == "__main__":
    main()
