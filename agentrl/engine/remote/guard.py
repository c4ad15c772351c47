"""ASGI middleware that requires the key for every request to a vLLM server.

vLLM's own key protects only the paths under /v1 and /inference. Its management endpoints (weights,
pauses, calls of any method of a worker) are open to every process of the machine. So this
middleware protects all paths. It is copied into a folder with the key file, and passed by
`--middleware`. It uses only the standard library, because it runs in the environment of the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hmac import compare_digest
from pathlib import Path
from typing import Any

KEY_FILE = "key"
OPEN_PATHS = ("/health",)
"""Paths without a key. The answer shows only that the server runs."""

_Scope = dict[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers 401 to requests without the key."""

    def __init__(self, app: _App):
        """Read the key from a file in the same folder. Without a key the server does not start."""
        self._app = app
        key = Path(__file__).with_name(KEY_FILE).read_bytes()
        if not key:
            raise ValueError("the key file is empty: every request would be accepted")
        self._expected = b"Bearer " + key

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: _Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(values) == 1 and compare_digest(values[0], self._expected)
