"""The tool server on a socket: heads of requests that are bounded, and an end without haste."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
from asyncio import BaseTransport, Transport
from collections.abc import Callable
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl import open_files
from agentrl.registry import tools
from agentrl.tools.descriptors import connections_accepted, descriptors_of_tools
from agentrl.tools.serving.app import MAX_SESSION_BODY, RETRY_AFTER_SECONDS, Meter, create_app
from agentrl.tools.serving.bind import bind, names_of, url_of
from agentrl.tools.serving.guard import REFUSED, refusal
from agentrl.tools.session import MAX_CALLS, Place, ToolHost

HEAD_SECONDS = 10.0
MAX_HEAD = 2**16
MAX_REQUEST = 2 * MAX_SESSION_BODY
"""Bytes of a request, with what its chunks are wrapped in; its body has limits of its own."""
DRAIN_SECONDS = 10.0
"""How long a server that was told to stop waits for the calls that run."""
END_SECONDS = 18.0
"""How long it may take after that: 5 s for open connections, 10 s for sessions, and some more."""

log = logging.getLogger("agentrl.tools")


class Connection(HttpToolsProtocol):
    """uvicorn's, which waits for a request's head for ever, and takes one of any length."""

    head_since = float("inf")
    """When the head began that is not complete yet."""
    most = 2**20
    """Connections of this process, as many as `ulimit -n` has room for."""
    _taken = 0

    def connection_made(self, transport: BaseTransport) -> None:  # type: ignore[override]
        """Count the time from here: a request is why somebody connects."""
        super().connection_made(cast(Transport, transport))
        self.head_since = time.monotonic()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Read on, unless it is too much."""
        if self._taken > MAX_HEAD:
            if self.head_since < float("inf"):
                return self.refuse(b"431 Request Header Fields Too Large", b"the head is too long")
            if self._taken > MAX_REQUEST:
                return self.transport.abort()
        self._taken += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Take the time."""
        super().on_message_begin()
        self.head_since = time.monotonic()
        self._taken = 0

    def on_headers_complete(self) -> None:
        """The rest is the application's."""
        self.head_since = float("inf")
        super().on_headers_complete()

    def _make_room(self) -> None:
        """Close a connection that waits for a request, else answer this one that all are busy."""
        for other in self.connections:
            if isinstance(other, Connection) and other._is_idle:
                other.transport.close()
                return
        self.app = all_busy

    @property
    def _is_idle(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.head_since == float("inf") and not self.transport.is_closing()

    def refuse(self, status: bytes, message: bytes) -> None:
        """Answer without having read the request, and hang up."""
        body = b'{"error":"%s","message":"%s"}' % (REFUSED.encode(), message)
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, len(body), body)
        )
        self.transport.close()


async def all_busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that the request may be sent again later, and hang up."""
    headers = {"retry-after": str(RETRY_AFTER_SECONDS), "connection": "close"}
    message = "the tool server has as many connections as it can hold"
    await refusal(503, "Busy", message, headers)(scope, receive, send)


def _reserve_descriptors() -> int:
    """Reserve descriptors for programs; return how many connections to accept (3/4 of the rest).

    How many episodes keep a sandbox open is not known here: `check_open_files` counts those.
    """
    programs = descriptors_of_tools(tools.get(name) for name in tools.names())
    open_files.reserve(programs)
    accepted = connections_accepted(open_files.left_for_connections())
    open_files.reserve(programs + accepted)
    return accepted


class ToolServer(uvicorn.Server):
    """The application on a socket of its own, bound from the start: `url` is final.

    SIGTERM and Ctrl-C drain it: sessions are not opened any more and calls refused, those that run
    may end (`DRAIN_SECONDS`), open sessions are closed. The second signal ends the process. So does
    the time (`END_SECONDS`), because a tool may ignore that it is cancelled.

    Args:
        host: address to bind.
        port: 0 lets the system choose.
        token: bearer token; an address that others can reach needs one.
        ready: called once requests are answered.
        bound: a socket that listens already, instead of `host` and `port`.
        place: of this process among the server's workers.
        max_calls: calls at once; the others are told to come again.
        mcp: also serve the Model Context Protocol, at /mcp.

    Raises:
        UserError: no token where one is needed, or an address that cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        ready: Callable[[], None],
        *,
        bound: socket.socket | None = None,
        place: Place = Place(),
        max_calls: int = MAX_CALLS,
        mcp: bool = False,
    ):
        open_files.raise_limit()
        Connection.most = _reserve_descriptors()
        self._socket = bound or bind(host, port, token)
        self.url = url_of(self._socket)
        self._ready = ready
        self._drained_by = float("inf")
        self._has_ended = threading.Event()
        meter = Meter()
        self._host = ToolHost(meter.ran, place=place, max_calls=max_calls)
        names = names_of(self._socket)
        app = create_app(self._host, meter, token=token, names=names, mcp=mcp)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=120,  # longer than clients keep connections, so they hang up
                timeout_graceful_shutdown=5,
            )
        )

    def serve_forever(self) -> None:
        """Serve until a signal, or `should_exit`."""
        try:
            self.run(sockets=[self._socket])
        finally:
            self._has_ended.set()

    def drain(self) -> None:
        """Begin to stop, from any thread."""
        self._host.draining = True
        self._drained_by = time.monotonic() + DRAIN_SECONDS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM is a wish that is met, with exit code 0; after Ctrl-C the code tells of it."""
        if self._host.draining:
            os._exit(128 + sig)
        if sig == signal.SIGINT:
            self._captured_signals.append(sig)
        self.drain()
        threading.Thread(target=self._end_in_time, args=(sig,), daemon=True).start()

    def _end_in_time(self, sig: int) -> None:
        if not self._has_ended.wait(DRAIN_SECONDS + END_SECONDS):
            log.error("a tool does not stop although it was cancelled: the tool server exits now")
            os._exit(128 + sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        # What is loaded by now stays, so the collector need not go through it with every batch of
        # calls (a fifth of a call's time at 512 in flight).
        gc.collect()
        gc.freeze()
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: is it time to hang up, or to stop?"""
        if counter % 10 == 0:
            late = time.monotonic() - HEAD_SECONDS
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.head_since < late:
                    connection.refuse(b"408 Request Timeout", b"the head took too long")
        if self._host.draining and (
            not self._host.calls_in_flight or time.monotonic() > self._drained_by
        ):
            self.should_exit = True
        return await super().on_tick(counter)
