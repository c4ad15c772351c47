"""Tools: `@tool` makes them, a toolbox calls them, in this process or over HTTP."""

from __future__ import annotations

from agentrl.tools.decorator import tool
from agentrl.tools.open import open_toolbox
from agentrl.tools.record import Tool, ToolFunction
from agentrl.tools.toolbox import HttpToolbox, LocalToolbox, Toolbox

__all__ = ["HttpToolbox", "LocalToolbox", "Tool", "ToolFunction", "Toolbox", "open_toolbox", "tool"]
