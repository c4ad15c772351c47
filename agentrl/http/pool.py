"""The connections of this process: shared by all clients, and limited by `ulimit -n`.

A rollout asks the engine at one moment and its tools at the next. Each request needs a file
descriptor while it waits for a response; between requests, a rollout needs none. So all clients of
one server share its connections. An idle connection is closed if another server needs a connection
and the limit is reached. A request that finds no free connection waits. Among the requests to one
server, the first is served first. Among servers, the one with the fewest requests in flight is
served first, so that a tool call need not wait for all turns that were requested before it.

A request holds a connection only while a server works on it, and no such request waits for another
request of this process. So each connection becomes free again, and every request is served.

The length of a wait for a connection depends on what else this process does, and says nothing about
an episode, a tool or a judge. So a `TimeLimit` pauses during that wait.

Health checks and aborts must not wait behind the requests that they are about. They have a few
their own connections, see `reserved`.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from types import TracebackType
from typing import NamedTuple, Self, cast

import httptools

from agentrl import open_files

MAX_CONNECTIONS_TO_SERVER = 1024
"""The most requests in flight to one server; a tool server handles as many calls at once."""
MAX_RESERVED_CONNECTIONS = 16
_processes = 1
"""The number of processes that send requests to the same servers; see `share_servers`."""
MAX_IDLE_SECONDS = 60.0
"""Shorter than the keep-alive of our servers, so that a connection is rarely closed when it is
used."""


def share_servers(processes: int) -> None:
    """Divide the connections to each server by the processes of this run that use them."""
    global _processes
    _processes = processes


class ConnectionDropped(Exception):
    """The connection ended before the response did.

    The server may have handled the request or not.
    """


class InvalidResponse(Exception):
    """A response that this client does not accept: too long, encoded, or not HTTP."""


class Response(NamedTuple):
    """A complete response."""

    status: int
    body: bytes
    retry_after: bytes
    """The header `Retry-After`, or b""."""
    cookies: tuple[bytes, ...]
    """The headers `Set-Cookie`."""


class _Response:
    """A response that is being received. httptools calls the `on_` methods."""

    def __init__(self, max_bytes: int):
        self.complete: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The status, once the whole body has arrived."""
        self.keep_alive = False
        self.retry_after = b""
        self.cookies: tuple[bytes, ...] = ()
        self._parser = httptools.HttpResponseParser(self)
        self._bytes_left = max_bytes
        self._body: list[bytes] = []
        self._has_length = False
        self._headers_seen = False

    @property
    def body(self) -> bytes:
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    def feed(self, data: bytes) -> None:
        if self.complete.done():
            self.keep_alive = False  # The server sent more than one response.
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            # The exception of a callback is the context of the parser's exception.
            cause = e.__context__
            self.fail(cause if isinstance(cause, InvalidResponse) else InvalidResponse(str(e)))

    def end(self, error: Exception | None) -> None:
        """Handle the end of the connection.

        If the server did not announce the length of its response, the response is complete now.
        Otherwise the response is incomplete, and its future gets an exception.
        """
        if self._headers_seen and not self._has_length and error is None:
            self.on_message_complete()
        else:
            self.fail(ConnectionDropped(str(error) if error else "closed by the server"))

    def fail(self, error: BaseException) -> None:
        self.keep_alive = False
        if not self.complete.done():
            self.complete.set_exception(error)

    def on_message_begin(self) -> None:
        self.keep_alive = False
        if self.complete.done():
            raise InvalidResponse("more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._has_length = True
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise InvalidResponse(
                f"content-encoding {value.decode('latin-1')}, but only identity is accepted"
            )
        elif name == b"retry-after":
            self.retry_after = value
        elif name == b"set-cookie":
            self.cookies += (value,)

    def on_headers_complete(self) -> None:
        self._headers_seen = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._bytes_left -= len(body)
        if self._bytes_left < 0:
            raise InvalidResponse("the response is longer than this client accepts")
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._headers_seen and not self.complete.done():
            self.keep_alive = self._has_length and self._parser.should_keep_alive()
            self.complete.set_result(self._parser.get_status_code())


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    _transport: asyncio.Transport
    _response: _Response | None = None
    usable = True
    idle_since = 0.0
    on_lost: Callable[[HttpConnection], object] | None = None
    """Called when the connection ends, just before its descriptor is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse a part of the response. Unexpected data ends the connection."""
        if self._response is None:
            self.close()
        else:
            self._response.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response that is being read, and tell the pool."""
        self.usable = False
        if self._response is not None:
            self._response.end(exc)
        if self.on_lost is not None:
            self.on_lost(self)

    def close(self) -> None:
        """Close the connection at once; unsent data is dropped."""
        self.usable = False
        self._transport.abort()

    async def exchange(self, request: bytes, max_bytes: int) -> Response:
        """Send one request and return its response.

        If the caller is cancelled, the connection is closed.

        Raises:
            ConnectionDropped: the connection ended first.
            InvalidResponse: this client does not accept the response.
        """
        if not self.usable:  # The server closed it at once.
            raise ConnectionDropped("closed by the server")
        self._response = response = _Response(max_bytes)
        self._transport.write(request)
        try:
            status = await response.complete
            return Response(status, response.body, response.retry_after, response.cookies)
        finally:
            self._response = None
            if not response.keep_alive:
                self.close()


class Server(NamedTuple):
    """The address of a server. Requests to equal addresses share connections."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    name: str = ""
    """For messages, if the host is not an address."""

    @property
    def label(self) -> str:
        """The name of the server in messages: `name`, or else the URL."""
        return self.name or f"http{'s' if self.tls else ''}://{self.host}:{self.port}"


@cache
def default_tls() -> ssl.SSLContext:
    """Return the TLS context of all https connections. Certificates are read once."""
    return ssl.create_default_context()


@dataclass(slots=True, eq=False)
class ConnectionLease:
    """The right to use one connection; `connection` is None until it is opened."""

    queue: ServerQueue
    connection: HttpConnection | None


@dataclass(slots=True, eq=False)
class ServerQueue:
    """The connections to one server, and the requests that wait for a connection."""

    server: Server
    max_connections: int = MAX_CONNECTIONS_TO_SERVER
    """The most connections to the server; the smallest number of its clients."""
    busy: int = 0
    """The number of leases that requests hold."""
    idle: list[HttpConnection] = field(default_factory=list)
    """The connection that was used last is the last one."""
    waiting: deque[tuple[int, asyncio.Future[ConnectionLease]]] = field(default_factory=deque)


class ConnectionPool:
    """A pool of at most `max_connections` connections. Belongs to one event loop.

    Args:
        max_connections: includes idle connections and connections that are being opened.
        reserved: for health checks and aborts: their waits count against time limits.
    """

    def __init__(self, max_connections: int, *, reserved: bool = False):
        self.max_connections = max_connections
        self._paused_time_limits = nullcontext if reserved else paused_time_limits
        self.connection_count = 0
        """The number of connections, including those that are being opened."""
        self._waiters = 0
        self.queues: dict[Server, ServerQueue] = {}
        """The queue of each server that has a connection or a request."""
        self._tickets = itertools.count()
        self._sweep: asyncio.TimerHandle | None = None

    async def acquire(
        self, server: Server, max_connections: int = MAX_CONNECTIONS_TO_SERVER
    ) -> ConnectionLease:
        """Wait for a lease for one request; the caller returns it with `release`.

        Args:
            server: the server of the request.
            max_connections: the most connections to the server, which all its clients share.
        """
        queue = self.queues.get(server)
        if queue is None:
            queue = self.queues[server] = ServerQueue(server)
        limit = max(1, max_connections // _processes)
        queue.max_connections = min(queue.max_connections, limit)
        # A later request does not overtake the requests that wait.
        lease = None if queue.waiting else self._try_lease(queue)
        return lease or await self._wait(queue)

    async def connect(self, lease: ConnectionLease) -> HttpConnection:
        """Open the connection of a lease that has no connection.

        Raises:
            OSError: the server is unreachable, or its certificate is not valid.
        """
        server = lease.queue.server
        _, connection = await asyncio.get_running_loop().create_connection(
            HttpConnection, server.host, server.port, ssl=server.tls
        )
        if connection.usable:
            lease.connection, connection.on_lost = connection, partial(self._on_lost, lease.queue)
        return connection

    def release(self, lease: ConnectionLease) -> None:
        """Return a lease, and keep its connection if it can be used again."""
        queue, connection = lease.queue, lease.connection
        queue.busy -= 1
        if connection is None:
            self.connection_count -= 1
        elif connection.usable:
            connection.idle_since = time.monotonic()
            queue.idle.append(connection)
            if self._sweep is None:
                self._sweep = self._schedule_sweep()
        if self._waiters:
            self._serve_waiters()
        if not queue.idle:
            self._drop_if_empty(queue)

    @asynccontextmanager
    async def reserve_slot(self, server: Server) -> AsyncIterator[None]:
        """Hold a lease for a connection that the caller opens and closes within the block."""
        lease = await self.acquire(server)
        try:
            yield
        finally:
            self.release(lease)

    def close_idle(self, server: Server | None = None) -> None:
        """Close the idle connections to a server, or all of them."""
        for queue in [*self.queues.values()]:
            if server in (None, queue.server):
                for connection in queue.idle:
                    connection.close()

    def report(self) -> Iterator[str]:
        """Yield one line for each server that requests wait for. Callable from any thread."""
        for queue in [*self.queues.values()]:
            if queue.waiting:
                server = queue.server.label
                yield (
                    f"{len(queue.waiting)} requests to {server} wait for a free connection:"
                    f" {queue.busy} are in flight there, {self.connection_count} connections of at"
                    f" most {self.max_connections} are open (`ulimit -n` is {open_files.limit()})"
                )

    # -- internals ---------------------------------------------------------------------------------

    def _try_lease(self, queue: ServerQueue) -> ConnectionLease | None:
        """Return a lease of an idle connection or of a new one; None if no connection is free."""
        if queue.busy >= queue.max_connections:
            return None
        while queue.idle:
            # The connection that was used last is the most likely to be still open.
            connection = queue.idle.pop()
            if connection.usable and connection.idle_since > time.monotonic() - MAX_IDLE_SECONDS:
                queue.busy += 1
                return ConnectionLease(queue, connection)
            connection.close()
        if self.connection_count < self.max_connections:
            self.connection_count += 1
            queue.busy += 1
            return ConnectionLease(queue, None)
        return None

    async def _wait(self, queue: ServerQueue) -> ConnectionLease:
        future: asyncio.Future[ConnectionLease] = asyncio.get_running_loop().create_future()
        waiter = next(self._tickets), future
        queue.waiting.append(waiter)
        self._waiters += 1
        self._serve_waiters()
        try:
            with self._paused_time_limits():
                return await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.release(future.result())
            elif waiter in queue.waiting:
                queue.waiting.remove(waiter)
            self._drop_if_empty(queue)
            raise
        finally:
            self._waiters -= 1

    def _serve_waiters(self) -> None:
        """Give free connections to the requests that wait."""
        while queues := [
            queue
            for queue in self.queues.values()
            if queue.waiting and queue.busy < queue.max_connections
        ]:
            queue = min(queues, key=lambda queue: (queue.busy, queue.waiting[0][0]))
            _, future = queue.waiting[0]
            if future.done():  # The request was cancelled.
                queue.waiting.popleft()
                continue
            lease = self._try_lease(queue)
            if lease is None:
                if any(loop.is_closed() for loop in [*_pools]):
                    with _lock:
                        _share_limit()
                    continue
                self._close_longest_idle(
                    sum(min(len(q.waiting), q.max_connections - q.busy) for q in queues)
                )
                return
            queue.waiting.popleft()
            future.set_result(lease)

    def _close_longest_idle(self, count: int) -> None:
        """Close the `count` connections that have been idle longest, for requests that wait."""
        idle = [c for queue in self.queues.values() for c in queue.idle]
        usable = sorted((c for c in idle if c.usable), key=lambda c: c.idle_since)
        closing = len(idle) - len(usable)
        for connection in usable[: max(count - closing, 0)]:
            connection.close()

    def _on_lost(self, queue: ServerQueue, connection: HttpConnection) -> None:
        """Stop counting a connection that has ended, and serve the requests that wait."""
        self.connection_count -= 1
        if connection in queue.idle:
            queue.idle.remove(connection)
        self._serve_waiters()
        self._drop_if_empty(queue)

    def _close_expired(self) -> None:
        """Close connections that have been idle too long; run again later if any are left."""
        idle = [c for queue in self.queues.values() for c in queue.idle if c.usable]
        oldest = time.monotonic() - MAX_IDLE_SECONDS
        expired = [c for c in idle if c.idle_since <= oldest]
        for connection in expired:
            connection.close()
        self._sweep = self._schedule_sweep() if len(expired) < len(idle) else None

    def _schedule_sweep(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(MAX_IDLE_SECONDS / 4, self._close_expired)

    def _drop_if_empty(self, queue: ServerQueue) -> None:
        """Drop the queue of a server that has no connections and no requests."""
        is_empty = not (queue.busy or queue.idle or queue.waiting)
        # A connection may end after its queue was dropped and the server has a new queue.
        if is_empty and self.queues.get(queue.server) is queue:
            del self.queues[queue.server]


_pools: dict[asyncio.AbstractEventLoop, tuple[ConnectionPool, ConnectionPool]] = {}
_lock = threading.Lock()
_max_connections = 0
"""The limit for all event loops together."""


def pool_of_loop(*, reserved: bool = False) -> ConnectionPool:
    """Return the pool of the running event loop. All event loops share the limit equally."""
    loop = asyncio.get_running_loop()
    pools = _pools.get(loop) or _new_pools(loop)
    return pools[reserved]


def leave_pool() -> None:
    """Close the idle connections of the running event loop, and drop its pool.

    The other event loops divide the limit among themselves.

    Later requests of this loop get a new pool.
    """
    with _lock:
        pools = _pools.pop(asyncio.get_running_loop(), ())
        _share_limit()
    for pool in pools:
        pool.close_idle()


def waiting_requests() -> list[str]:
    """Return one line for each server that requests wait for, of all event loops."""
    return [line for pools in [*_pools.values()] for pool in pools for line in pool.report()]


def _new_pools(loop: asyncio.AbstractEventLoop) -> tuple[ConnectionPool, ConnectionPool]:
    global _max_connections
    with _lock:
        _share_limit()
        if not _pools:
            _max_connections = open_files.left_for_connections()
        pools = _pools[loop] = (
            ConnectionPool(_max_connections),
            ConnectionPool(MAX_RESERVED_CONNECTIONS, reserved=True),
        )
        _share_limit()
    return pools


def _share_limit() -> None:
    """Drop the pools of closed event loops, and divide the limit equally among the others."""
    for loop in [loop for loop in _pools if loop.is_closed()]:
        del _pools[loop]
    for pool, _ in _pools.values():
        pool.max_connections = max(1, _max_connections // len(_pools))


# -- time limits that pause during a wait for a connection ----------------------------------------

_active: ContextVar[tuple[TimeLimit, ...]] = ContextVar("active", default=())
"""The time limits whose blocks contain the running task."""


class TimeLimit:
    """A time limit like `asyncio.timeout`, plus the time that requests wait for a free connection.

    Tasks that are started within the block belong to it. Example::

        async with TimeLimit(60.0):  # raises TimeoutError after 60 s
            await client.request_json("GET", "/health", deadline=monotonic() + 5)

    Args:
        seconds: counted from the construction, also if the block is entered later.
    """

    __slots__ = ("_deadline", "_loop", "_since", "_timeout", "_token", "_waits")

    def __init__(self, seconds: float):
        self._deadline = time.monotonic() + seconds
        self._timeout: asyncio.Timeout | None = None
        self._waits = 0
        self._since = 0.0
        """The start of the pause, if `_waits` is not 0."""

    @property
    def deadline(self) -> float:
        """The `time.monotonic()` seconds at which the limit ends. A pause makes it later."""
        return self._deadline + (time.monotonic() - self._since if self._waits else 0.0)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        # The loop's clock need not be `time.monotonic`, so the time that is left is passed.
        end = self._loop.time() + self._deadline - time.monotonic()
        self._timeout = asyncio.Timeout(None if self._waits else end)
        await self._timeout.__aenter__()
        self._token = _active.set((*_active.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        _active.reset(self._token)
        assert self._timeout is not None
        return await self._timeout.__aexit__(kind, e, tb)

    def pause(self) -> None:
        """Stop the clock until `resume` was called as often as this method."""
        if self._waits == 0:
            self._since = time.monotonic()
            self._reschedule(None)
        self._waits += 1

    def resume(self) -> None:
        """End a pause."""
        self._waits -= 1
        if self._waits == 0:
            now = time.monotonic()
            self._deadline += now - self._since
            self._reschedule(self._deadline - now)

    def _reschedule(self, seconds: float | None) -> None:
        if self._timeout is None:  # The block has not been entered.
            return
        with suppress(RuntimeError):  # It has expired, or its block has ended.
            self._timeout.reschedule(None if seconds is None else self._loop.time() + seconds)


@contextmanager
def paused_time_limits() -> Iterator[None]:
    """Pause, within this block, the time limits that contain the running task."""
    loop = asyncio.get_running_loop()
    # A thread that copied a task's context may run another loop.
    limits = [limit for limit in _active.get() if limit._loop is loop]
    for limit in limits:
        limit.pause()
    try:
        yield
    finally:
        for limit in limits:
            limit.resume()


@asynccontextmanager
async def slot_held(slots: AbstractAsyncContextManager[object]) -> AsyncIterator[None]:
    """Run a block in one of a limited number of slots.

    The time limits of the episode pause while it waits for a slot.

    Args:
        slots: a semaphore; or `nullcontext()`, if the number is not limited.
    """
    async with AsyncExitStack() as stack:
        with paused_time_limits():
            await stack.enter_async_context(slots)
        yield
