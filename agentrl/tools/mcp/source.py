"""The tools of an MCP server in the registry: `--file mcp+http://HOST/PATH`, `mcp+stdio:COMMAND`.

    mcp+http://127.0.0.1:8000/mcp            over streamable HTTP; also mcp+https://
    mcp+stdio:python -m my_server --flag     a program that is started and spoken to by its pipes
    mcp+http://HOST/mcp#docs                 its tools are called docs__NAME

Listed once, when the name is loaded: a server that changes its tools while a run lasts changes
nothing for the run.

A remote server's words are shown to the model, and its schemas are run by a validator here. So
names are put behind the server's own, descriptions are cut, and a schema loses what could cost more
than it says: patterns (a regular expression may take forever) and references to elsewhere.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from agentrl.errors import ToolServerError, UserError
from agentrl.registry import tools
from agentrl.tools.payloads import Parameters, shorten
from agentrl.tools.schema import adopt
from agentrl.tools.tool import Tool, ToolFunction
from agentrl.tools.validation import subschemas

log = logging.getLogger("agentrl.tools")

TIMEOUT = 60.0
TOKEN_VARIABLE = "AGENTRL_MCP_TOKEN"
"""The environment variable with the bearer token of servers over HTTP."""
MAX_TOOLS = 256
MAX_DESCRIPTION = 2000
MAX_SCHEMA_BYTES = 16_384
MAX_DEPTH = 16

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_]+")
_COSTLY = {
    "pattern", "patternProperties", "format", "$ref", "$dynamicRef", "$schema", "$id", "$defs",
    "definitions", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
"""Keywords that are left out of a schema. The server checks its arguments itself."""

_EXPECTED = "mcp+http://HOST/PATH, mcp+https://HOST/PATH or mcp+stdio:COMMAND ARGUMENTS"
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")

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
    address = read_address(name)
    connection = Connection(address)
    try:
        called, listed = connection.list()
        # What the names of its tools begin with.
        prefix = address.label or _NOT_A_NAME.sub("_", called).strip("_")[:32] or "mcp"
        functions = functions_of(listed, prefix, address.shown)
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


# -- where it is ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    shown: str
    """For people."""
    url: str = ""
    command: tuple[str, ...] = ()
    label: str = ""
    """What its tools' names begin with; "" for what the server calls itself."""


def read_address(name: str) -> Address:
    """The address behind a name that begins with `mcp+`.

    Raises:
        UserError: not such a name, or a token in its URL.
    """
    if name.startswith("mcp+stdio:"):
        text, _, label = name.removeprefix("mcp+stdio:").partition(" #")
        try:
            command = tuple(shlex.split(text))
        except ValueError as e:
            raise UserError(f"{name}: {e}") from None
        if not command:
            raise UserError(f"{name}: no command: expected {_EXPECTED}")
        return Address(name, command=command, label=_label(name, label.strip()))
    url, _, label = name.removeprefix("mcp+").partition("#")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{name}: expected {_EXPECTED}")
    if parts.username or parts.password:
        raise UserError(f"no user and password in a URL: the token is in {TOKEN_VARIABLE}")
    return Address(f"mcp+{url}", url=url, label=_label(name, label))


def _label(name: str, label: str) -> str:
    if label and not _LABEL.fullmatch(label):
        raise UserError(f"{name}: #{label} must be letters, digits and _, at most 32")
    return label


# -- what it offers -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """One tool as a server describes it."""

    name: str
    description: str
    schema: Mapping[str, Any]


def functions_of(listed: Iterable[Listed], prefix: str, where: str) -> dict[str, ToolFunction]:
    """By the server's own name, what the registry is told of each of its tools.

    Those that are too many, or whose schema is too large or none at all, are left out with a
    warning.

    Raises:
        UserError: nothing is left.
    """
    found: dict[str, ToolFunction] = {}
    taken: dict[str, str] = {}
    left_out = 0
    for tool in listed:
        if len(found) == MAX_TOOLS:
            left_out += 1
            continue
        name = f"{prefix}__{_NOT_A_NAME.sub('_', tool.name)}"[:64]
        try:
            if name in taken:
                raise UserError(f"is named like {taken[name]!r}")
            parameters = _bounded(tool.schema, name, f"{where}: {tool.name[:80]}")
        except UserError as e:
            log.warning("%s: the tool %s is left out: %s", where, tool.name[:80], e)
            continue
        taken[name] = tool.name
        described = shorten(tool.description, MAX_DESCRIPTION)
        shown = {"name": name, "description": described, "parameters": parameters.schema}
        found[tool.name] = ToolFunction(
            name=name,
            attribute="",
            schema={"type": "function", "function": shown},
            parameters=parameters,
            is_async=True,
        )
    if left_out:
        log.warning("%s: of more than %d tools %d are left out", where, MAX_TOOLS, left_out)
    if not found:
        raise UserError(f"{where} offers no tools that can be used")
    return found


def _bounded(schema: Any, name: str, where: str) -> Parameters:
    """Parameters of a schema without what is costly.

    Raises:
        UserError: why it is of no use.
    """
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise UserError("its schema is not that of an object")
    try:
        written = orjson.dumps(schema)
    except TypeError as e:
        raise UserError(f"its schema: {e}") from None
    if len(written) > MAX_SCHEMA_BYTES:
        raise UserError(f"its schema has {len(written)} bytes, at most {MAX_SCHEMA_BYTES}")
    clean = orjson.loads(written)
    for depth, inner in subschemas(clean):
        if depth > MAX_DEPTH:
            raise UserError(f"its schema: nested deeper than {MAX_DEPTH}")
        for key in _COSTLY & inner.keys():
            del inner[key]
    return adopt({"properties": {}, **clean, "type": "object"}, name, where)
