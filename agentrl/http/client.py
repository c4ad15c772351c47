"""Requests of rollouts: JSON in, JSON out, for tools, engines, judges and simulated users.

Lean on purpose. A rollout makes a request for every tool call and every turn, and a client built of
request and response objects costs more than the tool behind it (httpx on these same connections:
240 us of CPU a request, this: 80). So a connection here is an `asyncio.Protocol` in front of
httptools' parser, and a request is one write.

What a caller may rely on: every request has a deadline that covers all of it; answers have a size
cap; no proxy is taken from the environment, no redirect is followed, no encoding but identity is
accepted. What goes wrong below HTTP is an `Infrastructure` error; what the server says is returned,
whatever its status.
"""

from __future__ import annotations

import asyncio
import random
import re
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self, cast

import httptools
import orjson

from agentrl.errors import Infrastructure
from agentrl.http.address import UNSAFE, bearer, split

MAX_ANSWER_BYTES = 16 * 2**20
MAX_CONNECTIONS = 1024
MAX_IDLE_SECONDS = 60.0
"""Shorter than our servers' keep-alive, so that a connection is rarely found dead."""

BUSY = (429, 503)
"""Statuses that may come with `Retry-After`."""
LEAST_PAUSE = 0.1
"""Seconds until a busy server is asked again that says "now"; twice as many each time, up to 1."""

_HEADER = re.compile(r"[a-z0-9-]+: [\x21-\x7e]+")


class _Dropped(Exception):
    """The connection ended before the answer did; the request may have been handled or not."""


class _Nonsense(Exception):
    """An answer this client does not take: too long, encoded, or not HTTP."""


class _Answer:
    """An answer while it arrives: httptools calls the `on_` methods."""

    def __init__(self, max_bytes: int):
        self.complete: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The status, once all of the body is here."""
        self.keep_alive = False
        self.retry_after = b""
        self._parser = httptools.HttpResponseParser(self)
        self._left = max_bytes
        self._body: list[bytes] = []
        self._has_length = False
        self._headers_seen = False

    @property
    def body(self) -> bytes:
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    def feed(self, data: bytes) -> None:
        if self.complete.done():
            self.keep_alive = False  # more than the one answer that was asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            # A callback's own exception arrives as the parser's context.
            self.fail(e.__context__ if isinstance(e.__context__, _Nonsense) else _Nonsense(str(e)))

    def end(self, error: Exception | None) -> None:
        """The connection is gone: the end of an answer that did not announce its length."""
        if self._headers_seen and not self._has_length and error is None:
            self.on_message_complete()
        else:
            self.fail(_Dropped(str(error) if error else "closed by the server"))

    def fail(self, error: BaseException) -> None:
        self.keep_alive = False
        if not self.complete.done():
            self.complete.set_exception(error)

    def on_message_begin(self) -> None:
        self.keep_alive = False
        if self.complete.done():
            raise _Nonsense("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._has_length = True
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise _Nonsense(f"content-encoding {value.decode('latin-1')}, which was not asked for")
        elif name == b"retry-after":
            self.retry_after = value

    def on_headers_complete(self) -> None:
        self._headers_seen = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._left -= len(body)
        if self._left < 0:
            raise _Nonsense("longer than this client accepts")
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._headers_seen and not self.complete.done():
            self.keep_alive = self._has_length and self._parser.should_keep_alive()
            self.complete.set_result(self._parser.get_status_code())


class _Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    _transport: asyncio.Transport
    _answer: _Answer | None = None
    usable = True
    idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.close()
        else:
            self._answer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._answer is not None:
            self._answer.end(exc)

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    async def exchange(self, request: bytes, max_bytes: int) -> tuple[int, bytes, bytes]:
        """Send one request; status, body and Retry-After of its answer.

        Cancelled, it closes the connection.
        """
        self._answer = answer = _Answer(max_bytes)
        self._transport.write(request)
        try:
            return await answer.complete, answer.body, answer.retry_after
        finally:
            self._answer = None
            if not answer.keep_alive:
                self.close()


class HttpClient:
    """JSON requests to one server, over kept-alive connections.

    Belongs to the event loop of its first request. Example::

        async with HttpClient("http://127.0.0.1:8900", token=token) as client:
            status, answer = await client.request_json("GET", "/health", deadline=monotonic() + 5)

    Args:
        base_url: scheme, host, port and perhaps a path that every request's path is added to.
        token: sent as `Authorization: Bearer`, if not empty.
        error: what a server that is down or talks nonsense raises.
        max_bytes: longest answer accepted.

    Raises:
        ConfigError: no http(s) URL, or a token that no header can hold.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str = "",
        error: type[Infrastructure] = Infrastructure,
        max_bytes: int = MAX_ANSWER_BYTES,
    ):
        url = split(base_url)
        shown = bearer(token)
        self.base_url = base_url.rstrip("/")
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/")
        self._headers = f"host: {url.netloc}\r\naccept: application/json\r\n" + (
            f"authorization: {shown}\r\n" if shown else ""
        )
        self._error = error
        self._max_bytes = max_bytes
        self._idle: list[_Connection] = []
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)

    async def request_json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline: float,
        retries: int = 0,
        patient: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Send `body` as JSON; the status and the parsed answer, whatever the status.

        Args:
            method: GET, POST, DELETE, ...
            path: below the base URL, percent-encoded by the caller.
            body: anything orjson writes; None sends no body.
            deadline: `time.monotonic()` seconds after which to give up, connecting included.
            retries: how often to send it again after the connection failed. Only for a request that
                may be handled twice; one that ran into its deadline is never sent again.
            patient: where the server is busy (429, 503) and says when to come again (Retry-After),
                do, as long as that is before the deadline.
            headers: of this request alone.

        Raises:
            Infrastructure: (the client's `error`) no connection, no answer in time, or an answer
                that is not JSON.
            ValueError: the path or a header holds characters that none can.
            TypeError: JSON cannot hold the body.
        """
        request = self._write(method, path, body, headers)
        where = f"{method} {self.base_url}{path}"
        try:
            # The loop's clock need not be `time.monotonic`, so the deadline travels as a duration.
            async with asyncio.timeout(deadline - time.monotonic()):
                status, answer, after = await self._send_again(request, retries)
                least = LEAST_PAUSE
                while patient and status in BUSY and after:
                    seconds = max(_seconds(after), least)
                    least = min(2 * least, 1.0)
                    if seconds > deadline - time.monotonic():
                        break
                    # Not all of those who were told the same time at that same time.
                    await asyncio.sleep(seconds * random.uniform(1.0, 1.25))
                    status, answer, after = await self._send_again(request, retries)
        except TimeoutError:
            raise self._error(f"{where}: no answer before the deadline") from None
        except (_Dropped, _Nonsense, OSError) as e:
            raise self._error(f"{where}: {e}") from None
        try:
            return status, orjson.loads(answer) if answer else None
        except orjson.JSONDecodeError:
            excerpt = answer[:200].decode("utf-8", "replace")
            raise self._error(f"{where}: status {status} and not JSON: {excerpt}") from None

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def _write(self, method: str, path: str, body: Any, headers: Mapping[str, str] | None) -> bytes:
        """The request's bytes."""
        target = self._prefix + path
        if UNSAFE.search(target) or not target.startswith("/"):
            raise ValueError(f"not a path that can be requested: {target!r}")
        head = f"{method} {target} HTTP/1.1\r\n{self._headers}"
        for name, value in (headers or {}).items():
            if not _HEADER.fullmatch(line := f"{name}: {value}"):
                raise ValueError(f"not a header that can be sent: {line!r}")
            head += line + "\r\n"
        if body is None:
            length = "" if method == "GET" else "content-length: 0\r\n"
            return f"{head}{length}\r\n".encode("ascii")
        content = orjson.dumps(body)
        return (
            f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        ).encode("ascii") + content

    async def _send_again(self, request: bytes, retries: int) -> tuple[int, bytes, bytes]:
        for attempt in range(retries):
            try:
                return await self._send(request)
            except (_Dropped, OSError):
                # The first failure may be a connection that died while idle: no reason to wait.
                await asyncio.sleep(0.1 * attempt)
        return await self._send(request)

    async def _send(self, request: bytes) -> tuple[int, bytes, bytes]:
        """One attempt, on an idle connection or a new one."""
        async with self._places:
            connection = await self._connection()
            answer = await connection.exchange(request, self._max_bytes)
            if connection.usable:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            return answer

    async def _connection(self) -> _Connection:
        oldest = time.monotonic() - MAX_IDLE_SECONDS
        while self._idle:
            # The last one used is the likeliest to be alive; the rest may grow old.
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.close()
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return connection


def _seconds(retry_after: bytes) -> float:
    """How long a `Retry-After` asks to wait; infinite where it cannot be read."""
    text = retry_after.decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        then = parsedate_to_datetime(text)
    except ValueError:
        return float("inf")
    return max((then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
