"""A connection to an MCP server, kept for as long as the process lives.

The protocol's client wants one task that opens and closes it. So each connection has a thread and
an event loop of its own; whoever calls a tool waits for that loop's answer in theirs.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from agentrl.errors import ToolError, ToolServerError
from agentrl.tools.mcp.source import MAX_TOOLS, TOKEN_VARIABLE, Address, Listed

_REFUSALS = (-32601, -32602)
"""JSON-RPC's codes of a request that is wrong: no such method, invalid parameters."""
START_SECONDS = 30.0
STOP_SECONDS = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """A connection while it lasts."""

    client: Client
    over: asyncio.Event
    owner: asyncio.Task[None]


class Connection:
    """One server. Its methods may be called from any loop or thread.

    Args:
        address: where it is.
    """

    def __init__(self, address: Address):
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._link: _Link | None = None
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def list(self) -> tuple[str, list[Listed]]:
        """What the server calls itself, and its tools; the caller is blocked.

        Raises:
            ToolServerError: it does not answer.
        """
        future = asyncio.run_coroutine_threadsafe(self._list(), self._loop)
        try:
            return future.result(START_SECONDS)
        except TimeoutError:
            future.cancel()
            raise ToolServerError(
                f"{self._address.shown} did not say within {START_SECONDS:g} s what it offers"
            ) from None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text that a tool answers.

        Raises:
            ToolError: the tool says that the call failed, or the server refused it.
            MCPError, ToolServerError: see `_answered`.
        """
        asked = self._call(name, arguments)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))

    def close(self) -> None:
        """End the connection, and the program if there is one. Idempotent."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(self._drop(self._link), self._loop)
        with contextlib.suppress(Exception):
            ending.result(STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    # -- in the connection's own loop -------------------------------------------------------------

    async def _list(self) -> tuple[str, list[Listed]]:
        link = await self._connected()
        tools: list[Listed] = []
        cursor: str | None = None
        while len(tools) <= MAX_TOOLS:
            page = await self._answered(link, link.client.list_tools(cursor=cursor))
            tools += [Listed(t.name, t.description or "", t.input_schema) for t in page.tools]
            cursor = page.next_cursor
            if not cursor:
                break
        info = link.client.server_info
        return (info.name if info else ""), tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        link = await self._connected()
        result = await self._answered(link, link.client.call_tool(name, arguments))
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed without a message")
        return text

    async def _answered(self, link: _Link, request: Coroutine[Any, Any, T]) -> T:
        """The answer of a request. Was it the request that failed, or all of the connection?

        Raises:
            ToolError: the server refused the request.
            MCPError: the server failed. Its text may be that of an exception over there.
            ToolServerError: it does not answer.
        """
        try:
            return await request
        except Exception as e:
            if isinstance(e, MCPError):
                if e.code in _REFUSALS:
                    raise ToolError(str(e)[:300]) from None
                if await _is_alive(link):
                    raise
            await self._drop(link)
            raise ToolServerError(f"{self._address.shown}: {type(e).__name__}: {e}") from e

    async def _connected(self) -> _Link:
        async with self._lock:
            if self._link is None or self._link.owner.done():
                ready: asyncio.Future[Client] = self._loop.create_future()
                over = asyncio.Event()
                owner = self._loop.create_task(self._own(ready, over))
                self._link = _Link(await ready, over, owner)
            return self._link

    async def _own(self, ready: asyncio.Future[Client], over: asyncio.Event) -> None:
        """Open the connection, keep it until it is over, and close it: all in one task."""
        try:
            async with asyncio.timeout(START_SECONDS) as opening, self._opened() as client:
                opening.reschedule(None)
                ready.set_result(client)
                await over.wait()
        except BaseException as e:
            if not ready.done():
                said = "; ".join(map(str, _leaves(e)))
                ready.set_exception(
                    ToolServerError(f"no MCP server at {self._address.shown}: {said}")
                )
            elif not isinstance(e, Exception):
                raise

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Client]:
        address = self._address
        if address.command:
            # Its environment is a bare one: it is not given the run's keys.
            program, *arguments = address.command
            async with Client(StdioServerParameters(command=program, args=arguments)) as client:
                yield client
            return
        token = os.environ.get(TOKEN_VARIABLE, "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False, timeout=60.0) as http,
            Client(streamable_http_client(address.url, http_client=http)) as client,
        ):
            yield client

    async def _drop(self, link: _Link | None) -> None:
        """Close it; whoever calls next has another."""
        if link is not None:
            if self._link is link:
                self._link = None
            link.over.set()
            await asyncio.wait((link.owner,), timeout=STOP_SECONDS)


async def _is_alive(link: _Link) -> bool:
    """Whether the server still answers."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await link.client.list_tools(cache_mode="bypass")
    except Exception:
        return False
    return True


def _text_of(result: Any) -> str:
    """The text of an answer; what is no text is named."""
    parts = [
        part.text if part.type == "text" else f"[{part.type} omitted: only text is supported]"
        for part in result.content
    ]
    if not parts and result.structured_content is not None:
        import orjson

        return orjson.dumps(result.structured_content, default=str).decode()
    return "\n".join(parts)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors in groups of groups of errors."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
