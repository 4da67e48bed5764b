"""Both origins on two loopback ports: one thread, one event loop, so every handler is atomic."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tests.hub_server.app import BLOB_ROUTES, HUB_ROUTES, KINDS, Origin
from tests.hub_server.faults import Faults
from tests.hub_server.state import State


def listen() -> socket.socket:
    server = socket.socket()
    # Headers and body are two writes: without this every answer waits 40 ms for an ACK.
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server.bind(("127.0.0.1", 0))
    server.listen(128)
    return server


def url_of(server: socket.socket) -> str:
    return "http://{}:{}".format(*server.getsockname())


@dataclass
class Serving:
    state: State
    servers: list[uvicorn.Server]
    sockets: list[socket.socket]

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        pairs = zip(self.servers, self.sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))

    def stop(self) -> None:
        self.state.faults.clear()
        for server in self.servers:
            server.should_exit = True


def prepare(folder: Path) -> Serving:
    """Ports are bound and listening on return, so a client may call before the thread runs."""
    for name in ("objects", "small", "parts", "cas"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sockets = [listen(), listen()]
    state = State(folder, Faults(KINDS), url_of(sockets[0]), url_of(sockets[1]))
    apps = [Origin("hub", HUB_ROUTES, state), Origin("blob", BLOB_ROUTES, state)]
    servers = [uvicorn.Server(config_of(app)) for app in apps]
    return Serving(state, servers, sockets)


def config_of(app: Origin) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
    )


@contextlib.contextmanager
def serving(folder: Path) -> Generator[Serving]:
    """The hub in a thread of this process."""
    hub = prepare(folder)
    thread = threading.Thread(target=hub.run, name="hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stop()
        thread.join(timeout=10)
        for sock in hub.sockets:
            sock.close()
