"""Check that this machine lets a run open as many files as it needs.

A rollout holds a connection only while it waits for the engine or for a tool. With fewer
connections than rollouts, requests wait for a free connection (`agentrl.http.pool`). This wait does
not change rewards and costs little time, because servers queue requests as well. A run with too few
connections to keep the servers busy would be many times slower, so it is refused.
"""

from __future__ import annotations

from agentrl import open_files, registry
from agentrl.config import file_names
from agentrl.errors import ConfigError
from agentrl.open_files import RESERVED
from agentrl.plural import plural
from agentrl.preflight.plan import Plan, rewards_with_programs
from agentrl.rollout_workers.workers import count_workers
from agentrl.tools.descriptors import descriptors_of_connections, descriptors_of_programs

MIN_CONNECTIONS = 256
"""The number of connections that keeps servers busy, regardless of the number of rollouts."""


def check_open_files(plan: Plan) -> None:
    """Raise the soft limit of open files, and reserve the descriptors that programs need.

    Raises:
        ConfigError: the hard limit is lower than the number of descriptors that the run or its tool
            server needs.
    """
    limit, config = open_files.raise_limit(), plan.config
    rollouts, formula = _load(plan)
    names = {name for kind in plan.kinds for name in kind.sample.tools}
    tools = [registry.tools.get(name) for name in sorted(names) if name in registry.tools]
    in_process = tools if config.tools.transport == "in_process" else []
    has_server = bool(tools) and not in_process
    uses_http = has_server or config.rollout.name != "local"
    connections = min(rollouts, MIN_CONNECTIONS) if uses_http else 0
    programs = descriptors_of_programs(
        in_process,
        config.sandbox,
        workers=config.reward.workers,
        episodes=rollouts,
        rewards_run_programs=bool(rewards_with_programs(plan)),
    )
    open_files.reserve(programs)
    needs = {"the run": (connections, 0, programs)}
    if has_server and config.tools.transport == "http":
        episodes = -(-rollouts // config.tools.workers)
        programs = descriptors_of_programs(tools, config.sandbox, episodes=episodes)
        opened = descriptors_of_connections(connections) - connections
        needs["the tool server"] = connections, opened, programs
    process = max(needs, key=lambda name: sum(needs[name]))
    connections, opened, programs = needs[process]
    total = connections + opened + programs + RESERVED
    if total <= limit:
        return
    raise ConfigError(
        f"the hard limit of `ulimit -n` lets a process open {limit} files, but {process} needs"
        f" {total}: {connections} for connections ({plural(rollouts, 'rollout')} at once:"
        f" {formula}; more than {MIN_CONNECTIONS} share connections), {opened} for files that tools"
        f" open, {programs} for programs and worker processes (sandbox.slots, reward.workers), and"
        f" {RESERVED} for everything else. Raise the hard limit (`ulimit -n {total}` as root;"
        f" `nofile` in /etc/security/limits.conf; `docker run --ulimit nofile={total}`), or lower"
        " the keys that are named here"
    )


def _load(plan: Plan) -> tuple[int, str]:
    """Return how many rollouts a process plays at once at most, and how it is computed."""
    c, loads = plan.config, [(0, "none")]
    if plan.train and not c.trainer.val_only:
        key, size, n = "batch_size", c.data.batch_size, c.rollout.n
        if c.algorithm.filter_groups and c.data.gen_batch_size:
            key, size = "gen_batch_size", c.data.gen_batch_size
        formula = f"data.{key}={size} x rollout.n={n}"
        if c.algorithm.adv_estimator == "remax":
            formula, n = f"data.{key}={size} x (rollout.n={n} and a greedy one)", n + 1
        loads.append((size * n, formula))
    if plan.val:
        rows = len(plan.val)
        formula = f"{plural(rows, 'row')} of {file_names(c.data.val)} x val.n={c.val.n}"
        loads.append((rows * c.val.n, formula))
    rollouts, formula = max(loads)
    if (workers := count_workers(c)) > 1:
        return -(-rollouts // workers), f"{formula}, in {workers} processes"
    return rollouts, formula
