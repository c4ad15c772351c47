"""The sandbox of this process: its settings, and one for each event loop that asks."""

from __future__ import annotations

import asyncio
import logging
import threading

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.base import (
    FILES_OF_BOX,
    FILES_OF_PROGRAM,
    MAX_BOXES,
    Limits,
    Sandbox,
    default_limits,
    slot_count,
)
from agentrl.sandbox.bubblewrap import Bubblewrap
from agentrl.sandbox.fusion import SandboxFusion
from agentrl.sandbox.unsafe import WARNING, UnsafeSubprocess
from agentrl.workers import PerLoop

log = logging.getLogger("agentrl.sandbox")

_config = SandboxConfig()
_sandboxes = PerLoop(lambda: open_sandbox(_config))


def configure(config: SandboxConfig) -> None:
    """Settings for this process, from here on; before, they are the defaults."""
    global _config, _sandboxes
    if config.backend == "unsafe-subprocess" and _config.backend != config.backend:
        log.warning(WARNING)
    if config != _config:
        _config, _sandboxes = config, PerLoop(lambda: open_sandbox(config))


def current() -> Sandbox:
    """The sandbox of the running event loop, made on first use."""
    return _sandboxes.get()


async def release() -> None:
    """Close the running event loop's sandbox, if it has one."""
    if sandbox := _sandboxes.pop():
        await sandbox.aclose()


def limits() -> Limits:
    """What a program may use where nobody says otherwise: as the section `sandbox` has it."""
    return default_limits(_config)


def files_needed(boxes: int = 0, config: SandboxConfig | None = None) -> int:
    """Return how many descriptors the programs of a process need.

    Args:
        boxes: boxes that are open at once, also where nothing runs in them.
        config: the section `sandbox`; None: the settings of this process.
    """
    config = config or _config
    if "://" in config.backend:  # programs run elsewhere
        return 0
    return FILES_OF_PROGRAM * slot_count(config.slots) + FILES_OF_BOX * min(boxes, MAX_BOXES)


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """The backend that the settings name; belongs to the running event loop.

    Raises:
        SandboxError: it is not for this system.
    """
    if config.backend == "bubblewrap":
        return Bubblewrap(config)
    if config.backend == "unsafe-subprocess":
        return UnsafeSubprocess(config)
    return SandboxFusion(config)


def probe(config: SandboxConfig) -> str:
    """Run a real program; "" if that works, else why it does not, and what to do.

    Blocks for as long as that takes: a fraction of a second.
    """
    said: list[str] = []
    # A thread has no event loop yet, wherever we are called from.
    thread = threading.Thread(target=lambda: said.append(asyncio.run(_probe(config))))
    thread.start()
    thread.join()
    return said[0] if said else "the program that was to be tried could not be started; see above"


async def _probe(config: SandboxConfig) -> str:
    try:
        sandbox = open_sandbox(config)
        done = await sandbox.run("print(6 * 7)")
        await sandbox.aclose()
    except SandboxError as e:
        return str(e)
    if done.stdout != "42\n" or not done.ok:
        return (
            f"a program that prints 42 in {sandbox.name} did not: {done}. Check"
            f" sandbox.python={config.python}, sandbox.memory_mb and sandbox.timeout_s"
        )
    return ""
