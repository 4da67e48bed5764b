"""A small object server of our own, for what a good server never does.

It speaks the three dialects that obstore does (S3, Google's XML, Azure blobs), ignores conditions
when told to, fails or hangs up where a test asks for it, and redirects downloads as the hub's
gateway does. The requests it has seen are kept.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

HANG_UP = "hang up"
"""A fault before the request is carried out: the connection closes without an answer."""
LOSE_ANSWER = "lose the answer"
"""A fault after the request is carried out."""


@dataclass
class Stored:
    content: bytes
    generation: int
    modified: float
    etag: str


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = field(repr=False)


Fault = str | int | tuple[int, str] | None
"""HANG_UP, LOSE_ANSWER, a status, or a status with an error code; None for no fault."""


def fail(method: str, ending: str, fault: Fault) -> Callable[[Request], Fault]:
    """The first such request meets `fault`."""
    done: list[Request] = []

    def decide(request: Request) -> Fault:
        if request.method == method and request.path.endswith(ending) and not done:
            done.append(request)
            return fault
        return None

    return decide


class ObjectServer:
    """`url` is ready once constructed; `close` when done. Every bucket exists unless `missing`."""

    def __init__(self, dialect: str = "s3") -> None:
        self.dialect = dialect
        self.objects: dict[str, Stored] = {}
        self.parts: dict[str, dict[str, bytes]] = {}
        self.requests: list[Request] = []
        self.ignored: set[str] = set()
        self.fault: Callable[[Request], Fault] = lambda request: None
        self.redirect_downloads_to: ObjectServer | None = None
        self.clock: Callable[[], float] = time.time
        self.generation = 0
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        serve = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        serve.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def key(self, ending: str) -> str:
        """The one stored object whose path ends so."""
        (found,) = (path for path in self.objects if path.endswith(ending))
        return found

    def seen(self, method: str, ending: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and r.path.endswith(ending)]

    def store(self, path: str, content: bytes) -> Stored:
        self.generation += 1
        etag = f'"{sha256(content).hexdigest()[:32]}"'
        self.objects[path] = Stored(content, self.generation, self.clock(), etag)
        return self.objects[path]

    # --- one request: (status, headers, body) ---

    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        method, query = request.method, request.query
        if method in ("GET", "HEAD"):
            if "list-type" in query or query.get("comp") == "list":
                return self._list(request)
            if method == "GET" and self.redirect_downloads_to:
                return 302, {"location": self.redirect_downloads_to.url + request.path}, b""
            return self._get(request)
        if method == "DELETE":
            self.objects.pop(request.path, None)
            return (202 if self.dialect == "azure" else 204), {}, b""
        if query.get("comp") == "batch":
            return self._batch(request)
        if method == "POST" or "uploadId" in query or query.get("comp") in ("block", "blocklist"):
            return self._multipart(request)
        return self._put(request, request.body)

    def _get(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        stored = self.objects.get(request.path)
        if stored is None:
            return _error(404, "BlobNotFound" if self.dialect == "azure" else "NoSuchKey")
        headers, content = _describe(stored), stored.content
        if wanted := request.headers.get("range") or request.headers.get("x-ms-range"):
            first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
            size, content = len(content), content[first : last + 1]
            if not content:
                return _error(416, "InvalidRange")
            headers["content-range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
            return 206, headers, content
        return 200, headers, content

    def _put(self, request: Request, content: bytes) -> tuple[int, dict[str, str], bytes]:
        stored = self.objects.get(request.path)
        wanted = {k: v for k, v in request.headers.items() if k not in self.ignored}
        generation = wanted.get("x-goog-if-generation-match")
        lost = (
            (wanted.get("if-none-match") == "*" and stored is not None)
            or ("if-match" in wanted and (stored is None or stored.etag != wanted["if-match"]))
            or (generation is not None and int(generation) != (stored.generation if stored else 0))
        )
        if lost and self.dialect == "azure" and "if-none-match" in wanted:
            return _error(409, "BlobAlreadyExists")
        if lost:
            return _error(412, "PreconditionFailed")
        done = 201 if self.dialect == "azure" else 200
        return done, _describe(self.store(request.path, content)), b""

    def _multipart(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        query = request.query
        if "uploads" in query:
            upload = f"<UploadId>{request.path}</UploadId>"
            body = f"<InitiateMultipartUploadResult>{upload}</InitiateMultipartUploadResult>"
            return 200, {}, body.encode()
        parts = self.parts.setdefault(request.path, {})
        part = query.get("partNumber") or query.get("blockid")
        if part:
            parts[part] = request.body
            return (201 if self.dialect == "azure" else 200), {"etag": f'"{part}"'}, b""
        order = [item.text or "" for item in ElementTree.fromstring(request.body).iter()]
        names = [text.strip('"') for text in order if text.strip('"') in parts]
        if self.dialect != "azure":
            names = sorted(parts, key=int)
        request.headers.pop("if-none-match", None)
        status, headers, _ = self._put(request, b"".join(parts[name] for name in names))
        etag = escape(headers["etag"])
        body = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        return status, headers, b"" if self.dialect == "azure" else body.encode()

    def _batch(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        """Azure: requests to delete, each one a part of a multipart body."""
        paths = re.findall(r"^DELETE (\S+) HTTP", request.body.decode(), re.MULTILINE)
        parts = ""
        for number, path in enumerate(paths):
            done = self.objects.pop(unquote(path), None) is not None
            status = "202 Accepted" if done else "404 The specified blob does not exist."
            parts += (
                f"--edge\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status}\r\n\r\n\r\n"
            )
        headers = {"content-type": "multipart/mixed; boundary=edge"}
        return 202, headers, (parts + "--edge--\r\n").encode()

    def _list(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        bucket = request.path.rstrip("/") + "/"
        prefix = bucket + request.query.get("prefix", "")
        delimiter = request.query.get("delimiter")
        found, folders = "", set()
        for path, stored in sorted(self.objects.items()):
            rest = path.removeprefix(prefix)
            if not path.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix.removeprefix(bucket) + rest.split(delimiter)[0] + delimiter)
            else:
                found += self._entry(path.removeprefix(bucket), stored)
        if self.dialect == "azure":
            found += "".join(f"<BlobPrefix><Name>{f}</Name></BlobPrefix>" for f in sorted(folders))
            body = f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>"
        else:
            found += "".join(
                f"<CommonPrefixes><Prefix>{f}</Prefix></CommonPrefixes>" for f in sorted(folders)
            )
            body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return 200, {"content-type": "application/xml"}, body.encode()

    def _entry(self, name: str, stored: Stored) -> str:
        size, etag, day = len(stored.content), escape(stored.etag), formatdate(stored.modified)
        if self.dialect == "azure":
            day = formatdate(stored.modified, usegmt=True)
            return (
                f"<Blob><Name>{name}</Name><Properties><Last-Modified>{day}</Last-Modified>"
                f"<Content-Length>{size}</Content-Length><Etag>{etag}</Etag>"
                "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            )
        day = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
        return (
            f"<Contents><Key>{name}</Key><LastModified>{day}</LastModified><Size>{size}</Size>"
            f"<ETag>{etag}</ETag></Contents>"
        )


def _describe(stored: Stored) -> dict[str, str]:
    return {
        "etag": stored.etag,
        "last-modified": formatdate(stored.modified, usegmt=True),
        "x-goog-generation": str(stored.generation),
    }


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, f"<Error><Code>{code}</Code></Error>".encode()


def _handler_for(server: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # one packet an answer

        def handle_any(self) -> None:
            address = urlsplit(self.path)
            query = parse_qs(address.query, keep_blank_values=True)
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            request = Request(
                self.command,
                unquote(address.path),
                {name: values[0] for name, values in query.items()},
                {name.lower(): value for name, value in self.headers.items()},
                body,
            )
            with server.lock:
                server.requests.append(request)
                fault = server.fault(request)
                if fault is None or fault == LOSE_ANSWER:
                    answer = server.answer(request)
                elif isinstance(fault, tuple):
                    answer = _error(*fault)
                else:
                    answer = _error(int(fault) if fault != HANG_UP else 0, "Fault")
            if isinstance(fault, str):
                self.close_connection = True
                return
            self._send(*answer)

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("content-length", str(len(body)))
            elif stored := server.objects.get(unquote(urlsplit(self.path).path)):
                self.send_header("content-length", str(len(stored.content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.wfile.flush()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    return Handler
