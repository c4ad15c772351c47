"""Serve the registered tools to MCP clients: `agentrl tools serve --mcp`.

The endpoint is /mcp of the tool server, behind the same guard. Each MCP session has one episode per
tool. The first call creates the object of a class tool, which is closed after it was idle for long.
Clients without a session (protocol version 2026-07-28 has none) get a new episode for every call.
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


class McpEndpoint:
    """The MCP endpoint for the tools of a process.

    Args:
        host: runs the calls.

    Raises:
        UserError: two tools offer a function of the same name.
    """

    path = "/mcp"

    def __init__(self, host: ToolHost):
        self._host = host
        specs = [tools.get(name).spec for name in tools.names() if _is_usable_without_row(name)]
        functions = [schema["function"] for schema in schemas_of(specs)]
        self._mcp_tools = [
            types.Tool(
                name=f["name"], description=f.get("description", ""), input_schema=f["parameters"]
            )
            for f in functions
        ]
        self._owners = {f: spec.name for spec in specs for f in spec.functions}
        self._turns = itertools.count()
        server = Server(
            "agentrl", version=__version__, on_list_tools=self._list, on_call_tool=self._call
        )
        # The guard checks hosts and origins.
        open_to = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        self._manager = StreamableHTTPSessionManager(app=server, security_settings=open_to)
        self.app = StreamableHTTPASGIApp(self._manager)
        """The ASGI application of `path`."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the session manager while the server runs."""
        async with self._manager.run():
            yield

    async def _list(self, context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._mcp_tools)

    async def _call(
        self, context: Any, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        session = context.request.headers.get(SESSION, "") if context.request else ""
        # One episode per tool: if one tool cannot be created, the others still work.
        owner = self._owners.get(params.name, "")
        episode = f"mcp-{session or uuid.uuid4().hex}-{owner}"
        try:
            result = await self._run_call(episode, owner, params, bool(session))
        except Exception as e:
            # Some protocol versions would send the message of the exception to the client.
            log.error("the MCP call of %r failed: %s", params.name[:80], e, exc_info=e.__cause__)
            kind = type(e).__name__
            raise MCPError(types.INTERNAL_ERROR, f"the tool server failed: {kind}") from None
        text = types.TextContent(type="text", text=result.content)
        return types.CallToolResult(content=[text], is_error=not result.ok)

    async def _run_call(
        self, episode: str, owner: str, params: types.CallToolRequestParams, keep_open: bool
    ) -> ToolResult:
        """Run a call and return its result. The episode is closed afterwards unless `keep_open`."""
        name, arguments = params.name, params.arguments or {}
        self._host.enter()
        try:
            if not owner:
                return unknown_tool(name, self._owners)
            await self._host.open(episode, Sample("mcp", (), tools=(owner,)), {})
            json_arguments = encode_arguments(ToolCall(name, arguments))
            if isinstance(json_arguments, ToolResult):
                return json_arguments
            session = self._host.session(episode)
            return await session.call(next(self._turns), 0, name, arguments)
        finally:
            self._host.leave()
            if owner and not keep_open:
                await self._host.close(episode)


def _is_usable_without_row(name: str) -> bool:
    """Return whether a tool works without a dataset row and an episode; log a warning if not."""
    tool: Tool = tools.get(name)
    if tool.is_environment:
        log.warning("the %s is not available to MCP clients: it needs an episode", tool.label)
        return False
    try:
        if tool.is_class:
            tool.arguments({}, Sample("mcp", ()))
    except DataError as e:
        log.warning("the tool %r is not available to MCP clients: %s", name, e)
        return False
    return True
