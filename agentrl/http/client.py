"""JSON requests to tools, engines, judges and simulated users.

The client is small on purpose. A rollout makes a request for every tool call and every turn, and a
client built of request and response objects costs more than the tool behind it (httpx on these same
connections: 240 us of CPU per request; this client: 80 us). So a connection (`pool.py`) is an
`asyncio.Protocol` in front of httptools' parser, and a request is one write. Code that is not async
makes few requests: `fetch` uses httpx.

Guarantees: every request has a deadline that covers everything except the wait for a free
connection (`pool.py`), whose length depends on other requests of this process; the size of
responses is limited; no proxy is taken from the environment, no redirect is followed, and no
encoding but identity is accepted. An error below HTTP is raised as `Infrastructure`. A response of
the server is returned, whatever its status.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

import httpx
import orjson

from agentrl import open_files
from agentrl.errors import ConfigError, Infrastructure
from agentrl.http.pool import (
    MAX_CONNECTIONS_TO_SERVER,
    ConnectionDropped,
    InvalidResponse,
    Response,
    Server,
    TimeLimit,
    default_tls,
    pool_of_loop,
)

MAX_RESPONSE_BYTES = 16 * 2**20

BUSY_STATUSES = (429, 503)
"""Statuses that may come with `Retry-After`."""
MIN_PAUSE = 0.1
"""The shortest time in seconds before a request to a busy server is repeated, even if `Retry-After`
is 0. It doubles with each repetition, up to 1."""

MAX_FETCHED_BYTES = 64 * 2**20
"""The longest response of `fetch`, in bytes. A server's description of itself may be long."""

NOT_PRINTABLE = re.compile(r"[^\x21-\x7e]")
_HEADER = re.compile(r"[a-z0-9-]+: [\x21-\x7e]+")


def authorization_header(token: str) -> str:
    """Return the value of the Authorization header for a token; "" without a token.

    Raises:
        ConfigError: the token is not printable ASCII.
    """
    if NOT_PRINTABLE.search(token):
        raise ConfigError("a bearer token must be printable ASCII without spaces")
    return f"Bearer {token}" if token else ""


def parse_base_url(base_url: str) -> SplitResult:
    """Return the parts of an http(s) URL.

    Raises:
        ConfigError: it is not the URL of a server.
    """
    error = ConfigError(f"not a server's URL: {base_url!r}. Expected: http://HOST:PORT")
    try:
        url = urlsplit(base_url)
        is_valid = url.scheme in ("http", "https") and url.hostname and url.port != 0
        str(url.hostname).encode("idna")  # Sockets use this encoding.
        _ = httpx.URL(base_url).host
    except (ValueError, httpx.InvalidURL):  # An invalid port or host name.
        raise error from None
    if not is_valid or NOT_PRINTABLE.search(base_url) or url.username or url.query or url.fragment:
        raise error
    return url


class HttpClient:
    """A client for JSON requests to one server, over kept-alive connections that all clients share.

    Example::

        async with HttpClient("http://127.0.0.1:8900", token=token) as client:
            status, response = await client.request_json("GET", "/health", deadline=monotonic() + 5)

    Args:
        base_url: scheme, host, port and optionally a path that is put before each request's path.
        token: sent as `Authorization: Bearer`, if not empty.
        error: the exception to raise if the server is unreachable or its response is invalid.
        max_bytes: the longest response to accept.
        max_connections: the most connections to the server that an event loop opens.
        reserved: True for health checks and aborts, which are few and short. They have their own
            connections, and the wait for such a connection counts against their deadlines.

    Raises:
        ConfigError: the URL is not http(s), or the token is not printable ASCII.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str = "",
        error: type[Infrastructure] = Infrastructure,
        max_bytes: int = MAX_RESPONSE_BYTES,
        max_connections: int = MAX_CONNECTIONS_TO_SERVER,
        reserved: bool = False,
    ):
        url = parse_base_url(base_url)
        authorization = authorization_header(token)
        self.base_url = base_url.rstrip("/")
        secure = url.scheme == "https"
        port = url.port or (443 if secure else 80)
        self.server = Server(url.hostname or "", port, default_tls() if secure else None)
        self._max_connections = max_connections
        self._reserved = reserved
        self._prefix = url.path.rstrip("/")
        self._headers = f"host: {url.netloc}\r\naccept: application/json\r\n" + (
            f"authorization: {authorization}\r\n" if authorization else ""
        )
        self._error = error
        self._max_bytes = max_bytes

    async def request_json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline: float,
        retries: int = 0,
        wait_if_busy: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Send `body` as JSON; return the status and the parsed response, whatever the status is.

        Args:
            method: GET, POST, DELETE, ...
            path: the path below the base URL, percent-encoded.
            body: anything that orjson can serialize, numpy arrays included; None sends no body.
            deadline: `time.monotonic()` seconds at which to give up, connecting included. The time
                that the request waits for a free connection is added to it.
            retries: how often to send the request again after the connection failed. Use 0 unless
                the server may handle the request twice. After the deadline, nothing is sent again.
            wait_if_busy: if the server is busy (429, 503) and sends Retry-After, wait and send the
                request again, unless the wait would exceed the deadline.
            headers: additional headers of this request.

        Raises:
            Infrastructure: (the client's `error`) no connection, no response in time, or a response
                that is not JSON.
            ValueError: the path or a header contains characters that are not allowed there.
            TypeError: the body cannot be written as JSON.
        """
        request = self.build_request(method, path, body, headers)
        where = f"{method} {self.base_url}{path}"
        status, response, *_ = await self.send(request, where, deadline, retries, wait_if_busy)
        try:
            return status, orjson.loads(response) if response else None
        except orjson.JSONDecodeError:
            excerpt = response[:200].decode("utf-8", "replace")
            raise self._error(f"{where}: status {status} and not JSON: {excerpt}") from None

    async def send(
        self, request: bytes, where: str, deadline: float, retries: int, wait_if_busy: bool
    ) -> Response:
        """Send a request that `build_request` has made; return the response, whatever it is.

        Args:
            request: the bytes of the request.
            where: the method and the URL, for messages.
            deadline: see `request_json`.
            retries: see `request_json`.
            wait_if_busy: see `request_json`.

        Raises:
            Infrastructure: (the client's `error`) no connection, or no response in time.
        """
        try:
            async with TimeLimit(deadline - time.monotonic()) as limit:
                response = await self._send_with_retries(request, retries)
                min_pause = MIN_PAUSE
                while wait_if_busy and response.status in BUSY_STATUSES and response.retry_after:
                    seconds = max(retry_after_seconds(response.retry_after), min_pause)
                    min_pause = min(2 * min_pause, 1.0)
                    if seconds > limit.deadline - time.monotonic():
                        break
                    # Jitter: clients with the same Retry-After must not all retry at once.
                    await asyncio.sleep(seconds * random.uniform(1.0, 1.25))
                    response = await self._send_with_retries(request, retries)
        except TimeoutError:
            raise self._error(f"{where}: no response before the deadline") from None
        except (ConnectionDropped, InvalidResponse, OSError) as e:
            raise self._error(f"{where}: {e}{open_files.advice(e)}") from None
        return response

    async def aclose(self) -> None:
        """Close the idle connections to the server, also those that other clients opened."""
        pool_of_loop(reserved=self._reserved).close_idle(self.server)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def build_request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the bytes of a request. The arguments are those of `request_json`.

        Raises:
            ValueError: the path or a header contains characters that are not allowed there.
            TypeError: the body cannot be written as JSON.
        """
        target = self._prefix + path
        if NOT_PRINTABLE.search(target) or not target.startswith("/"):
            raise ValueError(f"invalid path: {target!r}")
        head = f"{method} {target} HTTP/1.1\r\n{self._headers}"
        for name, value in (headers or {}).items():
            if not _HEADER.fullmatch(line := f"{name}: {value}"):
                raise ValueError(f"invalid header: {line!r}")
            head += line + "\r\n"
        if body is None:
            length = "" if method == "GET" else "content-length: 0\r\n"
            return f"{head}{length}\r\n".encode("ascii")
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return (
            f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        ).encode("ascii") + content

    async def _send_with_retries(self, request: bytes, retries: int) -> Response:
        for attempt in range(retries):
            try:
                return await self._send(request)
            except (ConnectionDropped, OSError):
                # The first failure may be a connection that was closed while idle: do not wait.
                await asyncio.sleep(0.1 * attempt)
        return await self._send(request)

    async def _send(self, request: bytes) -> Response:
        """Send the request once, on an idle connection or a new one."""
        pool = pool_of_loop(reserved=self._reserved)
        lease = await pool.acquire(self.server, self._max_connections)
        try:
            connection = lease.connection or await pool.connect(lease)
            return await connection.exchange(request, self._max_bytes)
        finally:
            pool.release(lease)


def retry_after_seconds(header: bytes) -> float:
    """Return the seconds that a `Retry-After` header asks to wait; infinite for anything else.

    A date is something else: the clock of the server may differ.
    """
    text = header.decode("latin-1").strip()
    return float(text) if text.isascii() and text.isdigit() else float("inf")


def fetch_json(
    base_url: str,
    path: str,
    body: Any = None,
    *,
    token: str = "",
    error: type[Infrastructure] = Infrastructure,
    timeout: float,
) -> tuple[int, Any]:
    """Send one GET, or a POST if there is a body, from code that is not async.

    Returns:
        The status and the parsed response.

    Raises:
        ConfigError: the URL is not http(s), or the token is not printable ASCII.
        Infrastructure: (`error`) no connection, no complete response in time, or a response that is
            too long or not JSON.
    """
    status, response = fetch(base_url, path, body, token=token, error=error, timeout=timeout)
    try:
        return status, orjson.loads(response) if response else None
    except orjson.JSONDecodeError as e:
        raise error(f"{base_url}{path}: status {status} and not JSON: {e}") from None


def fetch(
    base_url: str,
    path: str,
    body: Any = None,
    *,
    token: str = "",
    error: type[Infrastructure] = Infrastructure,
    timeout: float,
    max_bytes: int = MAX_FETCHED_BYTES,
) -> tuple[int, bytes]:
    """Send one request as `fetch_json` does, and return the response's bytes.

    It uses httpx, because callers make few such requests. `max_bytes` is the longest response to
    accept.

    Raises:
        ConfigError: the URL is not http(s), or the token is not printable ASCII.
        Infrastructure: (`error`) no connection, no complete response in time, or one that is too
            long.
    """
    method = "GET" if body is None else "POST"
    authorization = authorization_header(token)
    headers = {"Authorization": authorization} if authorization else {}
    sent = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        sent = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    url = parse_base_url(base_url).geturl().rstrip("/") + path
    where, end = f"{method} {url}", time.monotonic() + timeout
    content = bytearray()
    try:
        # A new context for each request would take longer than a request to our own servers.
        with (
            httpx.Client(trust_env=False, timeout=timeout, verify=default_tls()) as client,
            client.stream(method, url, headers=headers, content=sent) as response,
        ):
            for piece in response.iter_bytes():  # The timeout of httpx is for each piece.
                content += piece
                if len(content) > max_bytes:
                    raise error(f"{where}: the response has more than {max_bytes} bytes")
                if time.monotonic() > end:
                    raise error(f"{where}: no complete response within {timeout:g} s")
    except httpx.TimeoutException as e:
        raise error(f"{where}: no complete response within {timeout:g} s") from e
    except httpx.HTTPError as e:
        raise error(f"{where}: {type(e).__name__}: {e}") from e
    return response.status_code, bytes(content)
