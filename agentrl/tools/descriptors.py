"""Estimate how many file descriptors a process needs, and share those of a tool server.

Of the descriptors that programs and worker processes do not need, a tool server uses 3/4 for
connections. The others are for files and connections that its tools open.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentrl import open_files, sandbox
from agentrl.config import SandboxConfig
from agentrl.sandbox.program import MAX_BOXES, slot_count
from agentrl.tools.runner import PROCESSES
from agentrl.tools.tool import Tool

FILES_OF_PROGRAM, FILES_OF_BOX, FILES_OF_WORKER = 12, 6, 4
"""Descriptors that a process needs for a program, an open box and a worker process: pipes, files.
"""


def descriptors_of_programs(
    tools: Iterable[Tool],
    config: SandboxConfig,
    *,
    workers: int = 0,
    episodes: int = 0,
    rewards_run_programs: bool = False,
) -> int:
    """Return how many descriptors the programs and worker processes of a process need.

    Args:
        tools: the tools that the process runs.
        config: the section `sandbox`.
        workers: number of worker processes for rewards.
        episodes: number of concurrent episodes. Each keeps a box open if a stateful tool needs one.
        rewards_run_programs: whether rewards run programs in the same sandbox.
    """
    tools = list(tools)
    in_sandbox = [t for t in tools if "sandbox" in t.injected]
    workers += PROCESSES if any(t.process for t in tools) else 0
    total = FILES_OF_WORKER * workers
    is_local = "://" not in config.backend  # else programs run on another machine
    if is_local and (in_sandbox or rewards_run_programs):
        boxes = min(episodes, MAX_BOXES) if any(t.stateful for t in in_sandbox) else 0
        total += FILES_OF_PROGRAM * slot_count(config.slots) + FILES_OF_BOX * boxes
    return total


def descriptors_of_connections(connections: int) -> int:
    """Return how many free descriptors a tool server needs for this many connections."""
    return -(-connections * 4 // 3)


def reserve_for_server(tools: Iterable[Tool]) -> int:
    """Raise the soft limit and reserve descriptors for programs; return the connections to accept.

    The number of episodes that keep a box open is not known here; `check_open_files` counts them.
    """
    open_files.raise_limit()
    programs = descriptors_of_programs(tools, sandbox.current_config())
    open_files.reserve(programs)
    connections = max(1, open_files.left_for_connections() * 3 // 4)
    open_files.reserve(programs + connections)
    return connections
