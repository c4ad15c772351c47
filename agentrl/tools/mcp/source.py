"""Register the tools of an MCP server: `--file mcp+http://HOST/PATH`, `mcp+stdio:COMMAND`.

    mcp+http://127.0.0.1:8000/mcp            streamable HTTP; also mcp+https://
    mcp+stdio:python -m my_server --flag     a program that is started; messages go through pipes
    mcp+http://HOST/mcp#docs                 its tools have the names docs__NAME

The tools are listed once, when the name is loaded. If the server changes its tools later, the run
does not change.

The model reads the descriptions of a remote server, and its schemas are validated here. So tool
names get the server's name as a prefix, descriptions are shortened, and keywords that are expensive
to validate (patterns) or point elsewhere (references) are removed from the schemas.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import orjson

from agentrl.errors import ToolServerError, UserError
from agentrl.installation import install_command
from agentrl.registry import tools
from agentrl.tools.mcp.address import MAX_TOOLS, read_address
from agentrl.tools.payloads import Parameters, shorten
from agentrl.tools.schema import parameters_from_schema
from agentrl.tools.tool import Tool, ToolFunction
from agentrl.tools.validation import subschemas

log = logging.getLogger("agentrl.tools")

TIMEOUT = 60.0
MAX_DESCRIPTION = 2000
MAX_SCHEMA_BYTES = 16_384
MAX_DEPTH = 16

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_]+")
_REMOVED_KEYWORDS = {
    "pattern", "patternProperties", "format", "$ref", "$dynamicRef", "$schema", "$id", "$defs",
    "definitions", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
"""Keywords that are removed from a schema. The server itself validates its arguments."""

_loaded: dict[str, Any] = {}
"""Connections by name. A name that is loaded again uses the same connection."""


def load(name: str) -> None:
    """Register the tools of a server, each as `SERVER__TOOL`.

    Raises:
        UserError: the name is invalid, the server does not answer or has no usable tools, or the
            extra `mcp` is not installed.
        RegistryError: another tool has the same name.
    """
    if name in _loaded:
        return
    try:
        from agentrl.tools.mcp.connection import McpConnection
    except ImportError as e:
        raise UserError(f"{name} needs the extra `mcp` ({e}): {install_command('mcp')}") from None
    address = read_address(name)
    connection = McpConnection(address)
    try:
        server_name, listing = connection.list()
        # The prefix of the tools' names.
        prefix = address.label or _NOT_A_NAME.sub("_", server_name).strip("_")[:32] or "mcp"
        functions = functions_of(listing, prefix, address.shown)
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
    """Return the function that calls one of the server's tools."""

    async def remote(**arguments: Any) -> str:
        return await call(own_name, arguments)

    remote.__name__ = remote.__qualname__ = name
    return remote


def functions_of(listing: Iterable[Any], prefix: str, where: str) -> dict[str, ToolFunction]:
    """Convert tools of the package `mcp` to functions. The keys are the server's own names.

    Surplus tools, and tools without a usable schema, are left out with a warning.

    Raises:
        UserError: no tool is left.
    """
    functions: dict[str, ToolFunction] = {}
    names_in_use: dict[str, str] = {}
    surplus = 0
    for tool in listing:
        if len(functions) == MAX_TOOLS:
            surplus += 1
            continue
        name = f"{prefix}__{_NOT_A_NAME.sub('_', tool.name)}"[:64]
        try:
            if name in names_in_use:
                raise UserError(f"has the same name as {names_in_use[name]!r}")
            parameters = _safe_parameters(tool.input_schema, name, f"{where}: {tool.name[:80]}")
        except UserError as e:
            log.warning("%s: the tool %s is not used: %s", where, tool.name[:80], e)
            continue
        names_in_use[name] = tool.name
        description = shorten(tool.description or "", MAX_DESCRIPTION)
        shown = {"name": name, "description": description, "parameters": parameters.schema}
        functions[tool.name] = ToolFunction(
            name=name,
            attribute="",
            schema={"type": "function", "function": shown},
            parameters=parameters,
            is_async=True,
        )
    if surplus:
        log.warning(
            "%s: the server has more than %d tools; %d of them are not used",
            where,
            MAX_TOOLS,
            surplus,
        )
    if not functions:
        raise UserError(f"{where} has no usable tools")
    return functions


def _safe_parameters(schema: Any, name: str, where: str) -> Parameters:
    """Return the parameters for a schema without expensive keywords.

    Raises:
        UserError: the schema cannot be used. The message says why.
    """
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise UserError("its schema is not the schema of an object")
    try:
        encoded = orjson.dumps(schema)
    except TypeError as e:
        raise UserError(f"its schema is not valid JSON: {e}") from None
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise UserError(f"its schema has {len(encoded)} bytes, maximum {MAX_SCHEMA_BYTES}")
    clean = orjson.loads(encoded)
    for depth, inner in subschemas(clean):
        if depth > MAX_DEPTH:
            raise UserError(f"its schema is nested more than {MAX_DEPTH} levels deep")
        for key in _REMOVED_KEYWORDS & inner.keys():
            del inner[key]
    return parameters_from_schema({"properties": {}, **clean, "type": "object"}, name, where)
