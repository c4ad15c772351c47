"""What is registered here, for clients of the Model Context Protocol: `agentrl tools serve --mcp`.

At /mcp, beside the tool server's own paths and behind the same guard. An MCP session has an episode
for each tool: a class tool is made when it is first called and closed when it was idle for long.
Clients that open no session (the protocol of 2026-07-28 knows none) have one for every call.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from mcp import MCPError
from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from agentrl import __version__
from agentrl.errors import DataError
from agentrl.registry import tools
from agentrl.tools.payloads import encode_arguments, unknown_tool
from agentrl.tools.session import ToolHost
from agentrl.tools.tool import Tool, schemas_of
from agentrl.trajectory import Sample, ToolCall, ToolResult

log = logging.getLogger("agentrl.tools")

SESSION = "mcp-session-id"


class Served:
    """The protocol's door to the tools of a process.

    Args:
        host: runs the calls.

    Raises:
        UserError: two tools offer a function of the same name.
    """

    path = "/mcp"

    def __init__(self, host: ToolHost):
        self._host = host
        offers = [tools.get(name).offer for name in tools.names() if _needs_nothing(name)]
        self._listed = [_listed(schema["function"]) for schema in schemas_of(offers)]
        self._owners = {f: offer.name for offer in offers for f in offer.functions}
        self._turns = itertools.count()
        server = Server(
            "agentrl", version=__version__, on_list_tools=self._list, on_call_tool=self._call
        )
        # Hosts and origins are the guard's affair.
        open_to = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        self._manager = StreamableHTTPSessionManager(app=server, security_settings=open_to)
        self.app = StreamableHTTPASGIApp(self._manager)
        """An ASGI application for `path`."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For as long as the server lives."""
        async with self._manager.run():
            yield

    async def _list(self, context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._listed)

    async def _call(
        self, context: Any, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        session = context.request.headers.get(SESSION, "") if context.request else ""
        # One a tool: that one of them cannot be made is no affair of the others.
        owner = self._owners.get(params.name, "")
        episode = f"mcp-{session or uuid.uuid4().hex}-{owner}"
        try:
            result = await self._finished(episode, owner, params, bool(session))
        except Exception as e:
            # Some versions of the protocol would send the text of the exception.
            log.error("the MCP call of %r failed: %s", params.name[:80], e, exc_info=e.__cause__)
            kind = type(e).__name__
            raise MCPError(types.INTERNAL_ERROR, f"the tool server failed: {kind}") from None
        text = types.TextContent(type="text", text=result.content)
        return types.CallToolResult(content=[text], is_error=not result.ok)

    async def _finished(
        self, episode: str, owner: str, params: types.CallToolRequestParams, stays: bool
    ) -> ToolResult:
        """The result of a call; an episode that does not stay is closed after it."""
        name, arguments = params.name, params.arguments or {}
        self._host.enter()
        try:
            if not owner:
                return unknown_tool(name, self._owners)
            await self._host.open(episode, Sample("mcp", (), tools=(owner,)), {})
            encoded = encode_arguments(ToolCall(name, arguments))
            if isinstance(encoded, ToolResult):
                return encoded
            session = self._host.session(episode)
            return await session.call(next(self._turns), 0, name, arguments)
        finally:
            self._host.leave()
            if owner and not stays:
                await self._host.close(episode)


def _needs_nothing(name: str) -> bool:
    """Whether a tool can be had without a row; one that cannot is left out, with a warning."""
    tool: Tool = tools.get(name)
    try:
        if tool.is_class:
            tool.arguments({}, Sample("mcp", ()))
    except DataError as e:
        log.warning("the tool %r is not offered to MCP clients: %s", name, e)
        return False
    return True


def _listed(function: dict[str, Any]) -> types.Tool:
    return types.Tool(
        name=function["name"],
        description=function.get("description", ""),
        input_schema=function["parameters"],
    )
