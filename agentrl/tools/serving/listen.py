"""The tool server on its socket: limits for requests and connections, and a graceful shutdown."""

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
from agentrl.tools.runner import MAX_REPLACED
from agentrl.tools.serving.app import MAX_SESSION_BODY, RETRY_AFTER_SECONDS, ToolMetrics, create_app
from agentrl.tools.serving.bind import bind, host_names_of, url_of
from agentrl.tools.serving.guard import REFUSED, error_response
from agentrl.tools.session import MAX_CALLS, ShardInfo, ToolHost

HEAD_SECONDS = 10.0
MAX_HEAD = 2**16
MAX_REQUEST = 2 * MAX_SESSION_BODY
"""Limit of a request in bytes, including the framing of chunks. Its body has its own limits."""
CLIENT_SHARE = 0.9
"""The share of the connections of this process that one client may open. The others are for health
checks, for metrics, and for connections whose end this process has not noticed yet. If several runs
share the server and open more, idle connections are closed."""
DRAIN_SECONDS = 10.0
"""The time that a server that is stopping waits for running calls."""
END_SECONDS = 18.0
"""How long the shutdown may take after that: 5 s for connections, 10 s for sessions, and a reserve.
"""

log = logging.getLogger("agentrl.tools")


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
    message = "the tool server has reached its maximum of connections"
    await error_response(503, "Busy", message, headers)(scope, receive, send)


def _reserve_descriptors() -> int:
    """Reserve descriptors for programs; return how many connections to accept (3/4 of the rest).

    The number of episodes that keep a sandbox open is not known here; `check_open_files` counts
    them.
    """
    programs = descriptors_of_tools(tools.get(name) for name in tools.names())
    open_files.reserve(programs)
    max_connections = connections_accepted(open_files.left_for_connections())
    open_files.reserve(programs + max_connections)
    return max_connections


class ToolServer(uvicorn.Server):
    """The application on its own socket. The socket is bound at once, so `url` is known.

    SIGTERM and Ctrl-C drain the server: it refuses new sessions and calls, waits for running calls
    (`DRAIN_SECONDS`) and closes the open sessions. A second signal ends the process at once. If the
    shutdown takes longer than `END_SECONDS`, the process ends too: a tool may ignore its
    cancellation.

    Args:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        token: bearer token. An address that other machines can reach needs one.
        ready: called when the server answers requests.
        bound: a listening socket, used instead of `host` and `port`.
        shard: which of the server's workers this process is.
        max_calls: limit of concurrent calls. Further calls get a 503 that allows a retry.
        mcp: also serve the Model Context Protocol, at /mcp.

    Raises:
        UserError: a token is missing, or the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        ready: Callable[[], None],
        *,
        bound: socket.socket | None = None,
        shard: ShardInfo = ShardInfo(),
        max_calls: int = MAX_CALLS,
        mcp: bool = False,
    ):
        open_files.raise_limit()
        BoundedHttpProtocol.max_connections = _reserve_descriptors()
        self._socket = bound or bind(host, port, token)
        self.url = url_of(self._socket)
        self._ready = ready
        self._drained_by = float("inf")
        self._has_ended = threading.Event()
        metrics = ToolMetrics()
        self._host = ToolHost(metrics.observe_call, shard=shard, max_calls=max_calls)
        names = host_names_of(self._socket)
        app = create_app(
            self._host,
            metrics,
            token=token,
            names=names,
            max_client_connections=max(1, int(CLIENT_SHARE * BoundedHttpProtocol.max_connections)),
            mcp=mcp,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                # Longer than clients keep idle connections, so the clients close them.
                timeout_keep_alive=120,
                timeout_graceful_shutdown=5,
            )
        )

    def serve_forever(self) -> None:
        """Serve until a signal, or until `should_exit` is set."""
        try:
            self.run(sockets=[self._socket])
        finally:
            self._has_ended.set()

    def drain(self) -> None:
        """Begin to stop. May be called from any thread."""
        self._host.is_draining = True
        self._drained_by = time.monotonic() + DRAIN_SECONDS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain the server. After SIGTERM `serve_forever` returns; SIGINT raises there."""
        if self._host.is_draining:
            os._exit(128 + sig)
        if sig == signal.SIGINT:
            self._captured_signals.append(sig)
        self.drain()
        threading.Thread(target=self._end_in_time, args=(sig,), daemon=True).start()

    def _end_in_time(self, sig: int) -> None:
        if not self._has_ended.wait(DRAIN_SECONDS + END_SECONDS):
            log.error("a tool did not end after it was cancelled: the tool server exits now")
            os._exit(128 + sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server and report that it is ready."""
        await super().startup(sockets)
        # Modules and tools stay in memory. Frozen, the garbage collector skips them, which saves a
        # fifth of a call's time at 512 concurrent calls.
        gc.collect()
        gc.freeze()
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Close connections with a slow head; stop when many calls hang, or after draining."""
        if counter % 10 == 0:
            late = time.monotonic() - HEAD_SECONDS
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedHttpProtocol) and connection.head_since < late:
                    connection.refuse(b"408 Request Timeout", b"the head took too long")
        if self._host.is_worn_out and not self._host.is_draining:
            log.error("%d calls of tools hang: the tool server is restarted", MAX_REPLACED)
            self.drain()
        if self._host.is_draining and (
            not self._host.calls_in_flight or time.monotonic() > self._drained_by
        ):
            self.should_exit = True
        return await super().on_tick(counter)
