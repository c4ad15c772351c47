"""The connection to an MCP server, which stays open until the process ends.

The client of the package `mcp` must be opened and closed in the same task. So each connection has
its own thread with an event loop. Callers await the result in their own loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Tool

from agentrl.errors import ToolError, ToolServerError
from agentrl.tools.mcp.address import MAX_TOOLS, TOKEN_VARIABLE, Address
from agentrl.workers import LoopThread

_REFUSALS = (-32601, -32602)
"""JSON-RPC error codes of a wrong request: unknown method, invalid parameters."""
START_SECONDS = 30.0
STOP_SECONDS = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _OpenClient:
    """An open client, and the task that closes it."""

    client: Client
    closing: asyncio.Event
    owner: asyncio.Task[None]


class McpConnection:
    """The connection to one server. Its methods may be called from any event loop or thread.

    Args:
        address: the address of the server.
    """

    def __init__(self, address: Address):
        self._address = address
        self._loop = LoopThread("mcp")
        self._lock = asyncio.Lock()
        self._link: _OpenClient | None = None
        atexit.register(self.close)

    def list(self) -> tuple[str, list[Tool]]:
        """Return the server's name and its tools. Blocks the caller.

        Raises:
            ToolServerError: the server does not answer.
        """
        future = self._loop.submit(self._list())
        try:
            return future.result(START_SECONDS)
        except TimeoutError:
            future.cancel()
            raise ToolServerError(
                f"{self._address.shown} did not list its tools within {START_SECONDS:g} s"
            ) from None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text.

        Raises:
            ToolError: the tool reports that the call failed, or the server refused the call.
            MCPError, ToolServerError: see `_request`.
        """
        return await asyncio.wrap_future(self._loop.submit(self._call(name, arguments)))

    def close(self) -> None:
        """Close the connection, and stop the server's program if there is one. Idempotent."""
        atexit.unregister(self.close)
        if not self._loop.is_alive:
            return
        ending = self._loop.submit(self._disconnect(self._link))
        with contextlib.suppress(Exception):
            ending.result(STOP_SECONDS)
        self._loop.stop(STOP_SECONDS)

    # -- in the connection's own loop -------------------------------------------------------------

    async def _list(self) -> tuple[str, list[Tool]]:
        link = await self._connect()
        tools: list[Tool] = []
        cursor: str | None = None
        while len(tools) <= MAX_TOOLS:
            page = await self._request(link, link.client.list_tools(cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        info = link.client.server_info
        return (info.name if info else ""), tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        link = await self._connect()
        result = await self._request(link, link.client.call_tool(name, arguments))
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed without a message")
        return text

    async def _request(self, link: _OpenClient, request: Coroutine[Any, Any, T]) -> T:
        """Return the answer to a request. On an error, find out whether the server still answers.

        Raises:
            ToolError: the server refused the request.
            MCPError: the server failed. The message may be that of an exception in the server.
            ToolServerError: the server does not answer.
        """
        try:
            return await request
        except Exception as e:
            if isinstance(e, MCPError):
                if e.code in _REFUSALS:
                    raise ToolError(str(e)[:300]) from None
                if await _is_alive(link):
                    raise
            await self._disconnect(link)
            raise ToolServerError(f"{self._address.shown}: {type(e).__name__}: {e}") from e

    async def _connect(self) -> _OpenClient:
        async with self._lock:
            if self._link is None or self._link.owner.done():
                loop = asyncio.get_running_loop()
                ready: asyncio.Future[Client] = loop.create_future()
                closing = asyncio.Event()
                owner = loop.create_task(self._hold_open(ready, closing))
                self._link = _OpenClient(await ready, closing, owner)
            return self._link

    async def _hold_open(self, ready: asyncio.Future[Client], closing: asyncio.Event) -> None:
        """Open the connection, wait for `closing`, and close the connection, all in one task."""
        try:
            async with asyncio.timeout(START_SECONDS) as opening, self._open() as client:
                opening.reschedule(None)
                ready.set_result(client)
                await closing.wait()
        except BaseException as e:
            if not ready.done():
                reason = "; ".join(map(str, _flatten(e)))
                ready.set_exception(
                    ToolServerError(f"no MCP server at {self._address.shown}: {reason}")
                )
            elif not isinstance(e, Exception):
                raise

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[Client]:
        address = self._address
        if address.command:
            # The program gets a minimal environment, without the secrets of the run.
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

    async def _disconnect(self, link: _OpenClient | None) -> None:
        """Close a client. The next call opens a new one."""
        if link is not None:
            if self._link is link:
                self._link = None
            link.closing.set()
            await asyncio.wait((link.owner,), timeout=STOP_SECONDS)


async def _is_alive(link: _OpenClient) -> bool:
    """Return whether the MCP server still answers requests."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await link.client.list_tools(cache_mode="bypass")
    except Exception:
        return False
    return True


def _text_of(result: Any) -> str:
    """Return the text of a tool's answer. Other content is replaced by a note."""
    parts = [
        part.text if part.type == "text" else f"[{part.type} omitted: only text is supported]"
        for part in result.content
    ]
    if not parts and result.structured_content is not None:
        import orjson

        return orjson.dumps(result.structured_content, default=str).decode()
    return "\n".join(parts)


def _flatten(error: BaseException) -> list[BaseException]:
    """Return the exceptions in an exception group, including those in nested groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _flatten(inner)]
    return [error]
