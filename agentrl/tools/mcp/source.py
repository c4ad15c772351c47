"""The tools of an MCP server in the registry: `--file mcp+http://HOST/PATH`, `mcp+stdio:COMMAND`.

Listed once, when the name is loaded: a server that changes its tools while a run lasts changes
nothing for the run.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from agentrl.errors import ToolServerError, UserError
from agentrl.registry import tools
from agentrl.tools.mcp.address import read_address
from agentrl.tools.record import Tool

TIMEOUT = 60.0

_loaded: dict[str, Any] = {}
"""Connections by name: one a process, however often the name is loaded."""


def load(name: str) -> None:
    """Register what the server offers, each tool as `SERVER__TOOL`.

    Raises:
        UserError: no such server, none that answers, or nothing in it that can be used; or the
            extra is not installed.
        RegistryError: a name that is taken.
    """
    if name in _loaded:
        return
    try:
        from agentrl.tools.mcp.connection import Connection
    except ImportError as e:
        raise UserError(f'{name} needs the extra `mcp`: pip install "agentrl[mcp]" ({e})') from None
    from agentrl.tools.mcp.listing import functions_of, namespace

    address = read_address(name)
    connection = Connection(address)
    try:
        called, listed = connection.list()
        functions = functions_of(listed, namespace(address.label, called), address.shown)
        for own_name, function in functions.items():
            target = _caller(connection.call, own_name, function.name)
            tools.add(function.name, Tool(function.name, target, (function,), timeout=TIMEOUT))
    except ToolServerError as e:
        connection.close()
        hint = ". Is it running, and is its token in AGENTRL_MCP_TOKEN?" if address.url else ""
        raise UserError(f"{e}{hint}") from None
    except BaseException:
        connection.close()
        raise
    _loaded[name] = connection


def _caller(
    call: Callable[[str, dict[str, Any]], Coroutine[Any, Any, str]], own_name: str, name: str
) -> Callable[..., Coroutine[Any, Any, str]]:
    """The function behind one of the server's tools."""

    async def remote(**arguments: Any) -> str:
        return await call(own_name, arguments)

    remote.__name__ = remote.__qualname__ = name
    return remote
