"""Tools: `@tool` registers them, and a toolbox calls them in this process or over HTTP."""

from __future__ import annotations

from agentrl.tools.environment import Environment, environment
from agentrl.tools.tool import Tool, ToolFunction, tool
from agentrl.tools.toolbox import HttpToolbox, LocalToolbox, Toolbox, open_toolbox

__all__ = [
    "Environment", "HttpToolbox", "LocalToolbox", "Tool", "ToolFunction", "Toolbox", "environment",
    "open_toolbox", "tool",
]  # fmt: skip
