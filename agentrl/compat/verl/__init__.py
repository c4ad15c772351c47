"""Run verl's tools, interactions, rewards and scripts unchanged, and translate its configs.

verl need not be installed. Without verl, a user file can import the names of `stand_in` from
`verl...`; any other name is refused with a message. If verl is installed, its own classes are used.

    --file tools.yaml                         verl's tool_config_path
    --file interactions.yaml                  verl's interaction_config_path
    --file my_tools.py                        verl's function_tool_path: `@function_tool`
    agentrl train verl.yaml                   a config of verl's trainer (`config`)
    python -m agentrl.compat.verl script.py   a script that imports verl
"""

from __future__ import annotations

from agentrl.compat.verl.bases import (
    BaseInteraction,
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_tool,
)
from agentrl.compat.verl.files import load_yaml
from agentrl.compat.verl.stand_in import is_missing, is_relative, load_relative, stand_in

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "function_tool",
    "is_missing",
    "is_relative",
    "load_relative",
    "load_yaml",
    "stand_in",
]
