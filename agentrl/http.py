"""The one HTTP client: JSON in, JSON out, for tools, engines, judges and simulated users.

Lean on purpose. A rollout makes a request for every tool call and every turn, and a client built of
request and response objects costs more than the tool behind it. So a connection here is an
`asyncio.Protocol` in front of httptools' parser, and a request is one write.

What a caller may rely on: every request has a deadline that covers all of it; answers have a size
cap; no proxy is taken from the environment, no redirect is followed, no encoding but identity is
accepted. What goes wrong below HTTP is an `Infrastructure` error; what the server says is returned,
whatever its status.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

from agentrl.errors import ConfigError, Infrastructure

MAX_ANSWER_BYTES = 16 * 2**20
MAX_CONNECTIONS = 1024
MAX_IDLE_SECONDS = 60.0
"""Shorter than the keep-alive of the servers we start, so that a connection is rarely found dead."""

_UNSAFE = re.compile(r"[^\x21-\x7e]")


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

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._has_length = True
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise _Nonsense(f"content-encoding {value.decode('latin-1')}, which was not asked for")

    def on_headers_complete(self) -> None:
        self._headers_seen = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._left -= len(body)
        if self._left < 0:
            raise _Nonsense("too long")
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
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

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

    async def exchange(self, request: bytes, max_bytes: int, seconds: float) -> tuple[int, bytes]:
        """Send one request; status and body of its answer."""
        self._answer = answer = _Answer(max_bytes)
        timer = asyncio.get_running_loop().call_later(seconds, answer.fail, TimeoutError())
        self._transport.write(request)
        try:
            return await answer.complete, answer.body
        finally:
            timer.cancel()
            self._answer = None
            if not answer.keep_alive:
                self.close()
