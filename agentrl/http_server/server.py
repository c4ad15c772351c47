"""An HTTP server with limits: for requests, connections and the shutdown.

A request's head has `HEAD_SECONDS` and `MAX_HEAD` bytes, its body `BODY_SECONDS` and a limit of
bytes (`agentrl.http_server.guard.read_body`). A server that is stopping waits `SHUTDOWN_SECONDS`
for its connections; after a second signal, it does not wait. Only the tool server limits its
connections. The other servers have a few clients of one user, and only `ulimit -n` limits them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from asyncio import BaseTransport, Transport
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl.http_server.bind import url_of
from agentrl.http_server.guard import (
    MAX_LONG_BODY,
    REFUSED,
    RETRY_AFTER_SECONDS,
    error_response,
)

HEAD_SECONDS = 10.0
MAX_HEAD = 2**16
MAX_REQUEST = 2 * MAX_LONG_BODY
"""Limit of a request in bytes, including the framing of chunks. Its body has its own limits."""
SHUTDOWN_SECONDS = 5
"""The time that a server that is stopping waits for its connections."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for the length and the duration of a request's head."""

    head_since = float("inf")
    """When the unfinished head of a request began; infinity if there is none."""
    max_connections = 2**20
    """Limit of the connections of this process, from `ulimit -n`."""
    _received_bytes = 0

    def connection_made(self, transport: BaseTransport) -> None:  # type: ignore[override]
        """Start the clock of the first request's head."""
        super().connection_made(cast(Transport, transport))
        self.head_since = time.monotonic()
        if len(self.connections) > self.max_connections:
            self._close_idle_connection()

    def data_received(self, data: bytes) -> None:
        """Pass on received bytes, unless the request is too long."""
        if self._received_bytes > MAX_HEAD:
            if self.head_since < float("inf"):
                return self.refuse(b"431 Request Header Fields Too Large", b"the head is too long")
            if self._received_bytes > MAX_REQUEST:
                return self.transport.abort()
        self._received_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Start the clock of the next request's head."""
        super().on_message_begin()
        self.head_since = time.monotonic()
        self._received_bytes = 0

    def on_headers_complete(self) -> None:
        """Stop the clock of the head."""
        self.head_since = float("inf")
        super().on_headers_complete()

    def _close_idle_connection(self) -> None:
        """Close an idle connection. If there is none, answer the requests of this one with 503."""
        for other in self.connections:
            if isinstance(other, BoundedHttpProtocol) and other._is_idle:
                other.transport.close()
                return
        self.app = answer_busy

    @property
    def _is_idle(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.head_since == float("inf") and not self.transport.is_closing()

    def refuse(self, status: bytes, message: bytes) -> None:
        """Answer before the request is complete, and close the connection."""
        body = b'{"error":"%s","message":"%s"}' % (REFUSED.encode(), message)
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, len(body), body)
        )
        self.transport.close()


async def answer_busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a 503 that allows a retry, and close the connection."""
    headers = {"retry-after": str(RETRY_AFTER_SECONDS), "connection": "close"}
    message = "the server has reached its maximum of connections"
    await error_response(503, "Busy", message, headers)(scope, receive, send)


class HttpServer(uvicorn.Server):
    """A uvicorn server with the limits of this module.

    Args:
        app: the application. It reads bodies by `read_body`.
        bound: the listening socket.
        options: other settings of `uvicorn.Config`.
    """

    def __init__(self, app: ASGIApp, bound: socket.socket, **options: Any):
        self._socket = bound
        self.url = url_of(bound)
        settings: dict[str, Any] = {
            "http": BoundedHttpProtocol,
            "ws": "none",
            "lifespan": "off",
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            # Longer than clients keep idle connections, so the clients close them.
            "timeout_keep_alive": 120,
            "timeout_graceful_shutdown": SHUTDOWN_SECONDS,
        }
        super().__init__(uvicorn.Config(app, **settings | options))

    def serve_forever(self) -> None:
        """Serve until a signal, or until `should_exit` is set."""
        self.run(sockets=[self._socket])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop. After a second signal, do not wait for connections."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Close the connections whose head takes too long."""
        if counter % 10 == 0:
            late = time.monotonic() - HEAD_SECONDS
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedHttpProtocol) and connection.head_since < late:
                    connection.refuse(b"408 Request Timeout", b"the head took too long")
        return await super().on_tick(counter)


class EmbeddedServer(HttpServer):
    """A server on the event loop of its caller, which handles signals itself."""

    async def start(self) -> None:
        """Return when the server answers requests."""
        self._serving = asyncio.create_task(self.serve(sockets=[self._socket]))
        while not self.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        """Stop the server, and wait for its end."""
        self.should_exit = True
        await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield
