"""What stands in front of a server that runs code: nobody but the driver of a run gets past.

Host names we go by (a web page whose name resolves to this machine has another), no `Origin` (no
web page at all), the bearer token, JSON by its content type (a form cannot say that), and a body
that is bounded and arrives in bounded time.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 2**20
BODY_SECONDS = 15.0
REFUSED = "Refused"
"""The class of what is told to whom the guard turns away."""


class Guard:
    """ASGI middleware that refuses what it should, and hands on requests with their body read.

    Args:
        app: what it guards.
        token: the bearer token to ask for, everywhere but at /health; none if empty.
        hosts: names under which the server may be addressed; empty allows all.
        limits: by path, the longest body in bytes; elsewhere `MAX_BODY`.
        has_route: return whether the app takes this method at this path. Of a request that it does
            not take, no body is read: the app answers 404 or 405.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        hosts: frozenset[str],
        limits: Mapping[str, int],
        has_route: Callable[[Scope], bool],
    ):
        self._app = app
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._hosts = hosts
        self._limits = limits
        self._has_route = has_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or let it through."""
        if scope["type"] == "http":
            headers: dict[bytes, bytes] = dict(scope["headers"])
            try:
                self._check(scope["path"], headers)
                if scope["method"] == "POST" and self._has_route(scope):
                    limit = self._limits.get(scope["path"], MAX_BODY)
                    receive = _replay(await _body(receive, headers, limit), receive)
            except _Refused as e:
                await e.response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts and host not in self._hosts:
            raise _Refused(403, f"this server is not called {host!r}")
        if b"origin" in headers:
            raise _Refused(403, "not for web pages")
        given, wanted = headers.get(b"authorization", b""), self._authorization
        if wanted and path != "/health" and not hmac.compare_digest(given, wanted):
            raise _Refused(401, "a bearer token is needed, and the right one")


class _Refused(Exception):
    """A request that gets no further, and what it is told."""

    def __init__(self, status: int, message: str, *, hang_up: bool = False):
        headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        if hang_up:
            headers["connection"] = "close"
        self.response = refusal(status, REFUSED, message, headers)


def refusal(
    status: int, error: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer that is none: `{"error": class, "message": text}`."""
    content = orjson.dumps({"error": error, "message": message})
    return Response(content, status, headers, media_type="application/json")


async def _body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The whole body. One that does not announce its length is counted as it comes."""
    if headers.get(b"content-type", b"").split(b";")[0].strip() != b"application/json":
        raise _Refused(415, "content-type must be application/json")
    if int(headers.get(b"content-length", b"0")) > limit:
        raise _Refused(413, f"the body is longer than {limit} bytes")
    chunks: list[bytes] = []
    left = limit
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise _Refused(400, "the body ended early", hang_up=True)
                chunk = message.get("body", b"")
                left -= len(chunk)
                if left < 0:
                    raise _Refused(413, f"the body is longer than {limit} bytes", hang_up=True)
                if not chunks and not message.get("more_body", False):
                    return chunk
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise _Refused(408, f"the body took over {BODY_SECONDS:g} s", hang_up=True) from None


def _replay(body: bytes, rest: Receive) -> Receive:
    """The body at once; who asks on waits for the client to hang up."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return whole.pop() if whole else await rest()

    return receive


def _name(host: str) -> str:
    """A Host header without its port."""
    host = host.lower()
    return host if host.endswith("]") else host.rpartition(":")[0] or host
