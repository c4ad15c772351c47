"""Compute how many file descriptors tools need, and how many connections a tool server accepts.

Of the descriptors that programs and worker processes do not need, a tool server uses 3/4 for
connections. The others are for files and connections that its tools open.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentrl import sandbox
from agentrl.config import SandboxConfig
from agentrl.tools.runner import PROCESSES
from agentrl.tools.tool import Tool

FILES_OF_WORKER = 4
"""Descriptors that a worker process needs for its pipes."""


def descriptors_of_tools(
    tools: Iterable[Tool],
    config: SandboxConfig | None = None,
    *,
    episodes: int = 0,
    rewards_run_programs: bool = False,
) -> int:
    """Return how many descriptors the programs and worker processes of tools need.

    Args:
        tools: the tools that the process runs.
        config: the section `sandbox`; None takes the settings of this process.
        episodes: number of concurrent episodes. Each keeps a sandbox open if a stateful tool needs
            one.
        rewards_run_programs: whether rewards run programs in the same sandbox.
    """
    tools = list(tools)
    in_sandbox = [t for t in tools if "sandbox" in t.injected]
    total = FILES_OF_WORKER * PROCESSES if any(t.process for t in tools) else 0
    if in_sandbox or rewards_run_programs:
        boxes = episodes if any(t.stateful for t in in_sandbox) else 0
        total += sandbox.files_needed(boxes, config)
    return total


def connections_accepted(descriptors: int) -> int:
    """Return how many connections a tool server accepts with this many free descriptors."""
    return max(1, descriptors * 3 // 4)


def descriptors_for_connections(connections: int) -> int:
    """Return how many free descriptors a tool server needs for this many connections."""
    return -(-connections * 4 // 3)
