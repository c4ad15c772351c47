"""Tools: `@tool` registers them, and a toolbox calls them in this process or over HTTP."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.tools.environment import Environment, environment
from agentrl.tools.tool import Tool, ToolFunction, tool

if TYPE_CHECKING:
    from agentrl.tools.toolbox import HttpToolbox, LocalToolbox, Toolbox, open_toolbox

__all__ = [
    "Environment", "HttpToolbox", "LocalToolbox", "Tool", "ToolFunction", "Toolbox", "environment",
    "open_toolbox", "tool",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # The HTTP client of toolboxes takes long to import, and processes that run tools need none.
    if name in __all__:
        return getattr(importlib.import_module("agentrl.tools.toolbox"), name)
    raise AttributeError(f"module 'agentrl.tools' has no attribute {name!r}")
