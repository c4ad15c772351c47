"""Programs in namespaces of their own, by bubblewrap: no network, no files, no rights.

Each gets a file system of its own (/usr for reading, a small /tmp for writing), a network without
anything in it, no capabilities, a filter of system calls, rlimits, and, where we are root, a user
id of its own. Process 1 of the namespace is a shell that waits for the program: where it ends, the
kernel ends whatever else is in there, before bwrap is told. So when bwrap is gone, all of it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.advice import advice
from agentrl.sandbox.base import Box, Completed, EndedBy, Language, Limits
from agentrl.sandbox.child import Child
from agentrl.sandbox.namespace import SHELL, Files, bwrap_command, rlimit_command
from agentrl.sandbox.output import Capture
from agentrl.sandbox.slots import Slots, checked_files, default_limits
from agentrl.sandbox.uids import Uids, has_processes

log = logging.getLogger("agentrl.sandbox")

SETUP_SECONDS = 30.0
"""For bwrap to make its namespaces; longer is this machine's doing, not the program's."""
SAID_BYTES = 4096
"""Of what bwrap says about itself."""

_uids = Uids()


class Bubblewrap:
    """The sandbox of `sandbox.backend=bubblewrap`."""

    name = "bubblewrap"

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._slots = Slots(config.slots)
        self._limits = default_limits(config)

    async def run(
        self,
        code: str,
        *,
        language: Language = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Completed:
        """See `Sandbox.run`."""
        limits = limits or self._limits
        files = checked_files(files, limits)
        script = "/main.py" if language == "python" else "/main.sh"
        words = [self._config.python, "-s"] if language == "python" else ["bash"]
        async with self._slots.one():
            given = Files()
            try:
                async with _user() as uid:
                    command = bwrap_command(
                        self._config.python,
                        limits,
                        given,
                        files=files,
                        script=(script, code.encode("utf-8", "surrogatepass")),
                        uid=uid,
                    )
                    command += ["sh", "-c", SHELL, "sh", *rlimit_command(limits), *words, script]
                    read = given.add(stdin.encode("utf-8", "surrogatepass")) if stdin else DEVNULL
                    return await _run(command, given, read, limits)
            finally:
                given.close()


async def _run(command: list[str], given: Files, stdin: int, limits: Limits) -> Completed:
    """Run a command of bwrap's to its end."""
    killed: EndedBy = ""
    child = Child(command, given, stdin)

    def kill(why: EndedBy) -> None:
        nonlocal killed
        killed = killed or why
        child.kill()

    assert child.process.stdout and child.process.stderr
    outputs = [
        Capture(os.dup(pipe.fileno()), limits.output_bytes, lambda: kill("output"))
        for pipe in (child.process.stdout, child.process.stderr)
    ]
    child.process.stdout.close()
    child.process.stderr.close()
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = [loop.call_later(SETUP_SECONDS, child.kill)]
    child.began.add_done_callback(
        lambda _: timers.append(loop.call_later(limits.seconds, kill, "time"))
    )
    try:
        await child.ended()
        ended = time.monotonic()
    finally:
        for timer in timers:
            timer.cancel()
        child.kill()
        if not await child.gone():
            raise SandboxError("a program's processes did not end in time; its slot is given up")
        for output in outputs:
            # Nobody is left who could write.
            output.drain()
    stdout, stderr = (output.text for output in outputs)
    if child.exit_code is None and not killed:
        raise SandboxError(advice(stderr))
    code = child.exit_code if child.exit_code is not None else -signal.SIGKILL
    ...
