"""Access control of a server: other users and web pages in a browser must not use it.

A request needs a known Host header (DNS rebinding uses another one), no Origin header (web pages
send one), the bearer token, the content type JSON (HTML forms cannot send it), and a body of
bounded length that arrives in bounded time.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 2**20
MAX_LONG_BODY = 2**24
"""The limit of a body with a dataset row or a conversation: it may contain whole documents."""
BODY_SECONDS = 15.0
RETRY_AFTER_SECONDS = 1
REFUSED = "Refused"
"""The error class of requests that the guard refuses."""


class Guard:
    """Middleware of a Starlette application: checks a request, reads its body and passes it on.

    If the application does not serve the path with this method, the body is not read: it answers
    with 404 or 405.

    Args:
        app: the application behind it.
        token: the bearer token of all paths but those in `public`; "" asks for none.
        hosts: the host names of the server; an empty set allows all.
        limits: the longest body in bytes, by path; elsewhere `MAX_BODY`.
        public: the paths that need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        hosts: frozenset[str],
        limits: Mapping[str, int],
        public: frozenset[str] = frozenset({"/health"}),
    ):
        self._app = app
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._hosts = hosts
        self._limits = limits
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[bytes, bytes] = dict(scope["headers"])
            try:
                self._check(scope["path"], headers)
                if scope["method"] == "POST" and _has_route(scope):
                    if (
                        headers.get(b"content-type", b"").split(b";")[0].strip()
                        != b"application/json"
                    ):
                        raise HttpRefused(415, "content-type must be application/json")
                    limit = self._limits.get(scope["path"], MAX_BODY)
                    receive = _replay(await read_body(receive, headers, limit), receive)
            except HttpRefused as e:
                await e.response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        refuse_web_pages(headers, self._hosts)
        actual, expected = headers.get(b"authorization", b""), self._authorization
        if expected and path not in self._public and not hmac.compare_digest(actual, expected):
            raise HttpRefused(401, "the bearer token is missing or wrong")


class HttpRefused(Exception):
    """The request is refused with this status; `response` is the answer."""

    def __init__(self, status: int, message: str, *, hang_up: bool = False):
        super().__init__(message)
        self.status = status
        headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        if hang_up:
            headers["connection"] = "close"
        self.response = error_response(status, REFUSED, message, headers)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with data as JSON."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(
    status: int, error: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response of a failed request: `{"error": class, "message": text}`."""
    return json_response({"error": error, "message": message}, status, headers)


def refuse_web_pages(headers: Mapping[bytes, bytes], hosts: frozenset[str]) -> None:
    """Refuse a request that a web page in a browser may have sent.

    Args:
        headers: the headers of the request.
        hosts: the host names of the server; an empty set allows all.

    Raises:
        HttpRefused: the Host header has another name, or there is an Origin header.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if hosts and name not in hosts:
        raise HttpRefused(403, f"unknown host name {name!r}")
    if b"origin" in headers:
        raise HttpRefused(403, "requests of web pages are not allowed")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """Return the whole body of a request.

    Raises:
        HttpRefused: it is longer than `limit` bytes, incomplete, or not there in `BODY_SECONDS`.
    """
    too_long = f"the body is longer than {limit} bytes"
    if int(headers.get(b"content-length", b"0")) > limit:
        raise HttpRefused(413, too_long)
    chunks: list[bytes] = []
    bytes_left = limit
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise HttpRefused(400, "the body is incomplete", hang_up=True)
                chunk = message.get("body", b"")
                bytes_left -= len(chunk)
                if bytes_left < 0:
                    raise HttpRefused(413, too_long, hang_up=True)
                if not chunks and not message.get("more_body", False):
                    return chunk
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        too_slow = f"the body took more than {BODY_SECONDS:g} s"
        raise HttpRefused(408, too_slow, hang_up=True) from None


async def discard_body(receive: Receive) -> None:
    """Read the rest of a body: a client that still sends it would not get the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while (await receive()).get("more_body"):
                pass


def _replay(body: bytes, rest: Receive) -> Receive:
    """Return a `receive` that delivers the body, then waits for the client to disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await rest()

    return receive


def _has_route(scope: Scope) -> bool:
    return any(r.matches(scope)[0] is Match.FULL for r in scope["app"].router.routes)
