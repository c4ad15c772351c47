"""The address of an MCP server."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentrl.errors import UserError

TOKEN_VARIABLE = "AGENTRL_MCP_TOKEN"
"""The environment variable with the bearer token of HTTP servers."""
MAX_TOOLS = 256
"""The most tools of a server that are used."""
_EXPECTED = "mcp+http://HOST/PATH, mcp+https://HOST/PATH or mcp+stdio:COMMAND ARGUMENTS"
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server."""

    shown: str
    """The address in messages."""
    url: str = ""
    command: tuple[str, ...] = ()
    label: str = ""
    """The prefix of the tools' names; "" takes the name that the server reports."""


def read_address(name: str) -> Address:
    """Parse a name that begins with `mcp+`.

    Raises:
        UserError: it is not such a name, or its URL contains a user or password.
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
        raise UserError(f"{name} is not the address of an MCP server: expected {_EXPECTED}")
    if parts.username or parts.password:
        raise UserError(
            f"the URL contains a user or password: put the token into {TOKEN_VARIABLE} instead"
        )
    return Address(f"mcp+{url}", url=url, label=_label(name, label))


def _label(name: str, label: str) -> str:
    if label and not _LABEL.fullmatch(label):
        raise UserError(f"{name}: #{label} must be letters, digits and _, at most 32")
    return label
