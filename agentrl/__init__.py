"""Reinforcement learning for language-model agents that talk over several turns and call tools.

This module exports the public names. Each is imported when it is first used, so that
`import agentrl` is fast and only `Trainer` needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.file_loaders import file_loaders
from agentrl.terminal import escape_warnings
from agentrl.trainer import default_observers

if TYPE_CHECKING:
    from agentrl.agent_loops import Episode, agent_loop
    from agentrl.agent_loops.play import play
    from agentrl.callbacks import callback
    from agentrl.config import Config, load_config
    from agentrl.data import load_samples
    from agentrl.errors import Infrastructure, ToolError, UserError
    from agentrl.interactions import Interaction, interaction
    from agentrl.registry import advantage_estimator, policy_loss
    from agentrl.replies import Reply
    from agentrl.report import Run, load_run
    from agentrl.rewards import reward
    from agentrl.tools import Environment, environment, tool
    from agentrl.trainer import Trainer
    from agentrl.trajectory import Message, Sample, Scores, ToolCall, ToolResult, Trajectory

__version__ = "0.2.0"

escape_warnings()

_MODULES = {
    "agent_loops": ("Episode", "agent_loop"),
    "callbacks": ("callback",),
    "config": ("Config", "load_config"),
    "data": ("load_samples",),
    "errors": ("Infrastructure", "ToolError", "UserError"),
    "interactions": ("Interaction", "interaction"),
    "registry": ("advantage_estimator", "policy_loss"),
    "replies": ("Reply",),
    "report": ("Run", "load_run"),
    "rewards": ("reward",),
    "agent_loops.play": ("play",),
    "tools": ("Environment", "environment", "tool"),
    "trainer": ("Trainer",),
    "trajectory": ("Message", "Sample", "Scores", "ToolCall", "ToolResult", "Trajectory"),
}

__all__ = [
    "Config", "Environment", "Episode", "Infrastructure", "Interaction", "Message", "Reply", "Run",
    "Sample", "Scores", "ToolCall", "ToolError", "ToolResult", "Trainer", "Trajectory", "UserError",
    "advantage_estimator", "agent_loop", "callback", "environment", "interaction", "load_config",
    "load_run", "load_samples", "play", "policy_loss", "reward", "tool",
]  # fmt: skip


file_loaders["mcp"] = lambda: importlib.import_module("agentrl.tools.mcp.source")
file_loaders["environment"] = lambda: importlib.import_module("agentrl.tools.remote_environment")
file_loaders["door"] = lambda: importlib.import_module("agentrl.doors")
file_loaders["verl"] = lambda: importlib.import_module("agentrl.compat.verl")
default_observers.append(
    lambda config: importlib.import_module("agentrl.observers").open_observers(config)
)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"agentrl.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
