"""How an MCP server is named: where files are, on the command line or in `files`.

mcp+http://127.0.0.1:8000/mcp            over streamable HTTP; also mcp+https://
mcp+stdio:python -m my_server --flag     a program that is started and spoken to by its pipes
mcp+http://HOST/mcp#docs                 its tools are called docs__NAME
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentrl.errors import UserError

TOKEN_VARIABLE = "AGENTRL_MCP_TOKEN"
"""The environment variable with the bearer token of servers over HTTP."""

_EXPECTED = "mcp+http://HOST/PATH, mcp+https://HOST/PATH or mcp+stdio:COMMAND ARGUMENTS"
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


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
