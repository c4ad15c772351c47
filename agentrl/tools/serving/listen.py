"""The tool server on its socket: its connections, and a shutdown that waits for calls."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from agentrl.http_server.bind import bind, host_names_of
from agentrl.http_server.server import BoundedHttpProtocol, HttpServer
from agentrl.registry import tools
from agentrl.tools.descriptors import reserve_for_server
from agentrl.tools.runner import MAX_REPLACED
from agentrl.tools.serving.app import ToolMetrics, create_app
from agentrl.tools.session import MAX_CALLS, ShardInfo, ToolHost

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


class ToolServer(HttpServer):
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
        max_connections = reserve_for_server(tools.get(name) for name in tools.names())
        BoundedHttpProtocol.max_connections = max_connections
        bound = bound or bind(host, port, token)
        self._ready = ready
        self._drained_by = float("inf")
        self._has_ended = threading.Event()
        metrics = ToolMetrics()
        self._host = ToolHost(metrics.observe_call, shard=shard, max_calls=max_calls)
        app = create_app(
            self._host,
            metrics,
            token=token,
            names=host_names_of(bound),
            max_client_connections=max(1, int(CLIENT_SHARE * max_connections)),
            mcp=mcp,
        )
        super().__init__(app, bound, lifespan="on")

    def serve_forever(self) -> None:
        """Serve until a signal, or until `should_exit` is set."""
        try:
            super().serve_forever()
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
        """Stop when many calls hang, or after draining."""
        if self._host.is_worn_out and not self._host.is_draining:
            log.error("%d calls of tools hang: the tool server is restarted", MAX_REPLACED)
            self.drain()
        if self._host.is_draining and (
            not self._host.calls_in_flight or time.monotonic() > self._drained_by
        ):
            self.should_exit = True
        return await super().on_tick(counter)
