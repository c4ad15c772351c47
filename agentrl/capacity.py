"""Check that this machine lets a run open as many files as it needs.

A rollout holds a connection only while it waits for the engine or for a tool. With fewer
connections than rollouts, requests wait for a free connection (`agentrl.http.pool`). This wait does
not change rewards and costs little time, because servers queue requests as well. A run with too few
connections to keep the servers busy would be many times slower, so it is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from agentrl import open_files, registry
from agentrl.config import SandboxConfig, file_names
from agentrl.errors import ConfigError
from agentrl.http.pool import MAX_CONNECTIONS_TO_SERVER
from agentrl.open_files import RESERVED
from agentrl.plan import Plan, rewards_with_programs
from agentrl.plural import plural
from agentrl.tools import Tool
from agentrl.tools.descriptors import (
    FILES_OF_WORKER,
    descriptors_for_connections,
    descriptors_of_tools,
)

MIN_CONNECTIONS = 256
"""The number of connections that keeps servers busy, regardless of the number of rollouts."""


class _Load(NamedTuple):
    """The largest number of rollouts that a run plays at once."""

    rollouts: int
    formula: str
    """How the number is computed, for messages."""
    keys: str
    """The config keys that set the number of rollouts."""


class _Need(NamedTuple):
    """The file descriptors that a process of the run needs."""

    process: str
    connections: int
    programs: int
    """Descriptors of programs, sandboxes and worker processes."""
    opened_by_tools: int = 0
    """Descriptors of files and connections that tools open."""

    @property
    def total(self) -> int:
        return self.connections + self.opened_by_tools + self.programs + RESERVED


def check_open_files(plan: Plan) -> None:
    """Raise the soft limit of open files, and reserve the descriptors that programs need.

    Raises:
        ConfigError: the hard limit is lower than the number of descriptors that the run or its tool
            server needs.
    """
    limit, load, config = open_files.raise_limit(), _load(plan), plan.config.sandbox
    open_files.reserve(_needs(plan, load.rollouts, config)[0].programs)
    need = _largest_need(plan, load.rollouts, config)
    if need.total <= limit:
        return
    parts = [
        f"{need.connections} for connections ({plural(load.rollouts, 'rollout')} at once:"
        f" {load.formula})"
    ]
    if need.opened_by_tools:
        parts.append(f"{need.opened_by_tools} for files that tools open")
    parts.append(f"{need.programs} for programs, sandboxes and worker processes")
    advice = [
        f"Raise the hard limit (`ulimit -n {need.total}` as root; `nofile` in"
        f" /etc/security/limits.conf; `docker run --ulimit nofile={need.total}`)"
    ]
    # More than `MIN_CONNECTIONS` rollouts need no more connections, so a small step down in the
    # number of rollouts may change nothing.
    max_rollouts = bisect_right(
        range(1, load.rollouts), limit, key=lambda n: _largest_need(plan, n, config).total
    )
    if max_rollouts:
        advice.append(f"play at most {plural(max_rollouts, 'rollout')} at once ({load.keys})")
    fewest_slots = config.model_copy(update={"slots": 1})
    if _largest_need(plan, load.rollouts, fewest_slots).total <= limit:
        advice.append("lower sandbox.slots")
    raise ConfigError(
        f"the hard limit of `ulimit -n` lets a process open {limit} files, but {need.process}"
        f" needs {need.total}: {', '.join(parts)}, and {RESERVED} for everything else."
        f" {', or '.join(advice)}"
    )


def shared_connections(plan: Plan) -> str:
    """Return a sentence for the log if there are fewer connections than rollouts, else ""."""
    load, limit = _load(plan), open_files.limit()
    if not _uses_http(plan):
        return ""
    available = limit - RESERVED - _needs(plan, load.rollouts, plan.config.sandbox)[0].programs
    if load.rollouts > available:
        limits = f"{plural(available, 'connection')} (hard limit of `ulimit -n`: {limit})"
    elif load.rollouts > MAX_CONNECTIONS_TO_SERVER:
        limits = f"at most {MAX_CONNECTIONS_TO_SERVER} connections to each server"
    else:
        return ""
    return (
        f"{plural(load.rollouts, 'rollout')} at once ({load.formula}) share {limits}. Requests wait"
        " for a free connection; this wait does not count against time limits"
    )


def _load(plan: Plan) -> _Load:
    c, loads = plan.config, [_Load(0, "none", "data.batch_size")]
    if plan.train and not c.trainer.val_only:
        key, size, n = "batch_size", c.data.batch_size, c.rollout.n
        if c.algorithm.filter_groups and c.data.gen_batch_size:
            key, size = "gen_batch_size", c.data.gen_batch_size
        formula = f"data.{key}={size} x rollout.n={n}"
        if c.algorithm.adv_estimator == "remax":
            formula, n = f"data.{key}={size} x (rollout.n={n} and a greedy one)", n + 1
        loads.append(_Load(size * n, formula, f"data.{key} or rollout.n"))
    if plan.val:
        rows = len(plan.val)
        formula = f"{plural(rows, 'row')} of {file_names(c.data.val)} x val.n={c.val.n}"
        loads.append(_Load(rows * c.val.n, formula, "val.n, or fewer rows to validate on"))
    return max(loads)


def _needs(plan: Plan, rollouts: int, sandbox_config: SandboxConfig) -> list[_Need]:
    """Return the needs of the run's process and, if there is a tool server, of its processes."""
    config, tools = plan.config, _tools(plan)
    connections = min(rollouts, MIN_CONNECTIONS) if _uses_http(plan) else 0
    programs = FILES_OF_WORKER * config.reward.workers + descriptors_of_tools(
        tools if config.tools.transport == "in_process" else [],
        sandbox_config,
        episodes=rollouts,
        rewards_run_programs=bool(rewards_with_programs(plan)),
    )
    needs = [_Need("the run", connections, programs)]
    if config.tools.transport == "http" and tools:
        episodes = -(-rollouts // config.tools.workers)
        programs = descriptors_of_tools(tools, sandbox_config, episodes=episodes)
        opened_by_tools = descriptors_for_connections(connections) - connections
        needs.append(_Need("the tool server", connections, programs, opened_by_tools))
    return needs


def _largest_need(plan: Plan, rollouts: int, sandbox_config: SandboxConfig) -> _Need:
    """Return the needs of the process that needs the most descriptors."""
    return max(_needs(plan, rollouts, sandbox_config), key=lambda need: need.total)


def _uses_http(plan: Plan) -> bool:
    """Return whether rollouts send requests to servers."""
    has_tool_server = plan.config.tools.transport != "in_process" and bool(_tools(plan))
    return has_tool_server or plan.config.rollout.name != "local"


def _tools(plan: Plan) -> list[Tool]:
    names = {name for kind in plan.kinds for name in kind.sample.tools}
    return [registry.tools.get(name) for name in sorted(names) if name in registry.tools]
