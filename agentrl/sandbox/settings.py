"""The sandbox settings of this process, and one sandbox per event loop."""

from __future__ import annotations

import asyncio
import logging
import threading

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.file_loaders import door_of
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.bubblewrap import Bubblewrap
from agentrl.sandbox.container import Container
from agentrl.sandbox.program import (
    Limits,
    default_limits,
)
from agentrl.sandbox.unsafe import WARNING, UnsafeSubprocess
from agentrl.workers import PerLoop

log = logging.getLogger("agentrl.sandbox")

_config = SandboxConfig()
_sandboxes = PerLoop(lambda: open_sandbox(_config))


def configure(config: SandboxConfig) -> None:
    """Set the section `sandbox` for this process. Before the first call, the defaults apply."""
    global _config, _sandboxes
    if config.backend == "unsafe-subprocess" and _config.backend != config.backend:
        log.warning(WARNING)
    if config != _config:
        _config, _sandboxes = config, PerLoop(lambda: open_sandbox(config))


def current() -> Sandbox:
    """Return the sandbox of the running event loop; the first call creates it."""
    return _sandboxes.get()


async def release() -> None:
    """Close the sandbox of the running event loop, if it has one."""
    if sandbox := _sandboxes.pop():
        await sandbox.aclose()


def limits() -> Limits:
    """Return the default limits of a program, from the section `sandbox`."""
    return default_limits(_config)


def current_config() -> SandboxConfig:
    """Return the section `sandbox` of this process."""
    return _config


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Create the sandbox of `sandbox.backend`. It belongs to the running event loop.

    Raises:
        SandboxError: this system does not support the backend.
    """
    if door := door_of(config.backend):
        raise SandboxError(
            f"sandbox.backend={config.backend} is for the rows of {door}:DIR alone. Programs of"
            " tools and rewards need another backend, such as bubblewrap or podman"
        )
    if config.backend == "bubblewrap":
        return Bubblewrap(config)
    if config.backend in ("docker", "podman"):
        return Container(config)
    if config.backend == "unsafe-subprocess":
        return UnsafeSubprocess(config)
    from agentrl.sandbox.fusion import SandboxFusion  # Its HTTP client takes long to import.

    return SandboxFusion(config)


def probe(config: SandboxConfig) -> str:
    """Run a test program. Return "" if it works, else a message with the cause and the remedy.

    This function blocks for a fraction of a second.
    """
    results: list[str] = []
    # In a thread, because the caller may already run an event loop.
    thread = threading.Thread(target=lambda: results.append(asyncio.run(_probe(config))))
    thread.start()
    thread.join()
    return (
        results[0] if results else "the test program could not be started; see the traceback above"
    )


async def _probe(config: SandboxConfig) -> str:
    try:
        sandbox = open_sandbox(config)
        done = await sandbox.run("print(6 * 7)")
        await sandbox.aclose()
    except SandboxError as e:
        return str(e)
    if done.stdout != "42\n" or not done.ok:
        return (
            f"a test program in {sandbox.name} did not print 42: {done}. Check"
            f" sandbox.python={config.python}, sandbox.memory_mb and sandbox.timeout_s"
        )
    return ""
