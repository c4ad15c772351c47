"""Sessions of OpenEnv servers, in the Python that has the package."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

from openenv.core.generic_client import GenericEnvClient
from serve import Refused, Unavailable
from websockets.exceptions import ConnectionClosed

LIMITS = {"connect_timeout_s": 60.0, "message_timeout_s": 300.0, "websocket_ping_timeout_s": 300.0}
"""The longest times that a server takes to answer."""
WAIT_SECONDS = 300.0
"""The longest time that an episode waits for a free session."""
POLL_SECONDS = 0.05
"""How often a server is asked for a free session, whatever the number of episodes that wait."""


class NoFreeSession(Unavailable):
    """The server has as many sessions as it allows."""


class Session(GenericEnvClient):
    """A session of the server.

    If the connection of a `GenericEnvClient` is lost, its next message opens a new session, which
    has another state. And its errors do not contain what is wrong with an action.
    """

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        server, kind = f"the server at {self.base_url}", message["type"]
        if self._ws is None:
            raise Unavailable(f"{server} has lost the session of the episode")
        try:
            # A server that refuses a session says why, and then closes the connection.
            with contextlib.suppress(ConnectionClosed):
                await self._ws.send(json.dumps(message))
            answer = await self._receive()
        except (ConnectionClosed, TimeoutError) as e:
            raise Unavailable(
                f"{server} does not answer a {kind}: {type(e).__name__} {e}"
            ) from None
        if answer["type"] != "error":
            return answer
        code, text = answer["data"].get("code"), answer["data"].get("message")
        if problems := answer["data"].get("errors"):
            text = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise Refused(f"invalid arguments: {text}")
        error = NoFreeSession if code == "CAPACITY_REACHED" else Unavailable
        raise error(f"{server} answered a {kind} with {code}: {text}")


_sessions: dict[str, Session] = {}
_waiting: collections.Counter[str] = collections.Counter()


async def describe(url: str) -> dict[str, Any]:
    """Return how a model acts: the field of an action that is its text, or tools.

    Returns:
        `text`: the field, or "". `tools`: for each, its name, the JSON schema of its arguments, and
        the part of its actions that the model does not choose.
    """
    action = await asyncio.to_thread(_read_schema, url)
    fields = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
    is_base = action.get("title") == "Action" and not fields  # The package then takes MCP calls.
    if is_base or fields.get("type", {}).get("const") in ("call_tool", "list_tools"):
        session, listed = await _open(url, lambda session: session.step({"type": "list_tools"}))
        await session.close()
        return {"text": "", "tools": [*map(_mcp_tool, listed.observation.get("tools", ()))]}
    if union := action.get("discriminator"):
        kinds = [
            (k, {"$ref": ref, "$defs": action["$defs"]}) for k, ref in union["mapping"].items()
        ]
        return {"text": "", "tools": [(k, s, {union["propertyName"]: k}) for k, s in kinds]}
    texts = [k for k, v in fields.items() if v.get("type") == "string" and "enum" not in v]
    if len(fields) == len(texts) == 1:
        return {"text": texts[0], "tools": []}
    return {"text": "", "tools": [("step", action, {})]}


async def start(episode: str, url: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Open a session and reset its environment: the first observation."""
    _sessions[episode], result = await _open(url, lambda session: session.reset(**arguments))
    return _observation(result)


async def step(episode: str, action: dict[str, Any]) -> dict[str, Any]:
    """Take an action: the observation and its reward."""
    return _observation(await _find(episode).step(action))


async def state(episode: str) -> dict[str, Any]:
    """Return the state of the environment."""
    return await _find(episode).state()


async def end(episode: str) -> None:
    """Close the session of an episode."""
    if session := _sessions.pop(episode, None):
        await session.close()


async def close() -> None:
    """Close all sessions."""
    await asyncio.gather(*map(end, list(_sessions)), return_exceptions=True)


def _read_schema(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=LIMITS["connect_timeout_s"]) as answer:
            return json.load(answer)["action"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Unavailable(f"GET {url}/schema: {type(e).__name__}: {e}") from None


async def _open(url: str, ask: Callable[[Session], Awaitable[Any]]) -> tuple[Session, Any]:
    """Return a session, and the answer to its first request. Wait if the server has none free.

    Raises:
        Unavailable: the server does not answer, or no session became free.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        session = Session(url, **LIMITS)
        try:
            await session.connect()
            return session, await ask(session)
        except BaseException as e:
            await session.close()
            if isinstance(e, ConnectionError):
                raise Unavailable(str(e)) from None
            if not isinstance(e, NoFreeSession) or time.monotonic() > deadline:
                raise
        _waiting[url] += 1
        try:
            await asyncio.sleep(POLL_SECONDS * _waiting[url])
        finally:
            _waiting[url] -= 1


def _find(episode: str) -> Session:
    if episode not in _sessions:
        raise Unavailable("the session of the episode was lost, because this process was restarted")
    return _sessions[episode]


def _mcp_tool(tool: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", tool["name"])[:64]  # Some templates allow no others.
    schema = {"description": tool["description"], **tool["input_schema"]}
    return name, schema, {"type": "call_tool", "tool_name": tool["name"]}


def _observation(result: Any) -> dict[str, Any]:
    """Return an observation as text, with its reward and whether it ends the episode."""
    seen = {k: v for k, v in result.observation.items() if k not in ("done", "reward", "metadata")}
    refused = False
    if {"tool_name", "result", "error"} <= seen.keys():  # of an MCP tool
        refused = seen["error"] is not None
        seen = {"result": seen["error"]["message"] if refused else _content(seen["result"])}
    [text, *others] = seen.values() or [""]
    if others or not isinstance(text, str):
        text = json.dumps(seen, ensure_ascii=False)
    reward = float(result.reward or 0.0)
    return {"text": text, "reward": reward, "done": bool(result.done), "refused": refused}


def _content(result: Any) -> Any:
    """Return the texts in the result of an MCP tool."""
    parts = result.get("content") if isinstance(result, dict) else None
    texts = (part.get("text", f"[{part.get('type')}]") for part in parts or ())
    return result if parts is None else "\n".join(texts)
