"""Loops and a reward that tests of rollout workers play in other processes."""

import logging
import os
import signal
import time

from agentrl import agent_loop, reward


@agent_loop("deadly")
async def deadly(ep):
    """Kill the process that plays row r1."""
    if ep.sample.id == "r1":
        os.kill(os.getpid(), signal.SIGKILL)
    await ep.generate()


@agent_loop("slow")
async def slow(ep):
    """Compute for a while, and block the event loop meanwhile."""
    time.sleep(0.05)
    await ep.generate()
    print("a line of a loop", flush=True)


@agent_loop("warns")
async def warns(ep):
    """Warn in the same words everywhere."""
    log = logging.getLogger("agentrl")
    log.warning("the same in all workers")
    log.error("an error of %d", os.getpid())
    await ep.generate()


@reward("process")
def process(trajectory) -> float:
    """Return the process that scores."""
    if trajectory.sample.extra.get("is_broken"):
        raise KeyError("a bug in the reward")
    return float(os.getpid())
