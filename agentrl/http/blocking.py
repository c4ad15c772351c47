"""Requests from code that is not async: seldom, and somebody waits."""

from __future__ import annotations

import time
from typing import Any

import httpx
import orjson

from agentrl.errors import Infrastructure
from agentrl.http.address import bearer, split

MAX_FETCHED_BYTES = 64 * 2**20
"""Of an answer: what a server says of itself may be longer than what it says to a rollout."""


def fetch_json(
    base_url: str,
    path: str,
    body: Any = None,
    *,
    token: str = "",
    error: type[Infrastructure] = Infrastructure,
    timeout: float,
) -> tuple[int, Any]:
    """One GET, or a POST of a body, from code that is not async."""
    status, answer = fetch(base_url, path, body, token=token, error=error, timeout=timeout)
    try:
        return status, orjson.loads(answer) if answer else None
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
) -> tuple[int, bytes]:
    """As `fetch_json`, whatever the answer is; httpx does it, since nobody waits for a thousand.

    Raises:
        ConfigError: no http(s) URL, or a token that no header can hold.
        Infrastructure: (`error`) no connection, no whole answer in time, or one too long.
    """
    method = "GET" if body is None else "POST"
    shown = bearer(token)
    headers = {"Authorization": shown} if shown else {}
    url = split(base_url).geturl().rstrip("/") + path
    where, end = f"{method} {url}", time.monotonic() + timeout
    content = bytearray()
    try:
        # Reading the certificates of the world takes longer than a request to our own servers.
        tls = url.startswith("https:")
        with (
            httpx.Client(trust_env=False, timeout=timeout, verify=tls) as client,
            client.stream(method, url, headers=headers, json=body) as answer,
        ):
            for piece in answer.iter_bytes():  # httpx's timeout is for each of them
                content += piece
                if len(content) > MAX_FETCHED_BYTES:
                    raise error(f"{where}: longer than this client accepts")
                if time.monotonic() > end:
                    raise error(f"{where}: no whole answer in {timeout:g} s")
    except httpx.HTTPError as e:
        raise error(f"{where}: {type(e).__name__}: {e}") from e
    return answer.status_code, bytes(content)
