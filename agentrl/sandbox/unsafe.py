"""Programs as this user, where nothing else can be had: no isolation, only tidiness.

They get a folder and an environment of their own, limits, and an end: the driver is told to reap
all that they start. But they can read what we can read, talk to any network, and kill us.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.base import Completed, Limits, Program, plain
from agentrl.sandbox.box import INSIDE, Driver, LocalSandbox, Slot, driver_command
from agentrl.sandbox.namespace import ENVIRONMENT

END_SECONDS = 10.0
WARNING = (
    "sandbox.backend=unsafe-subprocess: code that the model writes runs as you, on this machine,"
    " with its network and all files that you can read or delete"
)


class UnsafeSubprocess(LocalSandbox):
    """The sandbox of `sandbox.backend=unsafe-subprocess`: none."""

    name = "unsafe-subprocess"

    def __init__(self, config: SandboxConfig):
        if sys.platform != "linux":
            raise SandboxError(
                f"sandbox.backend=unsafe-subprocess needs Linux, this is {sys.platform}. Set it to"
                " the URL of a SandboxFusion server"
            )
        super().__init__(config)

    async def _run(self, program: Program) -> Completed:
        # In a slot already.
        driver = self._start(program.files, program.limits, contextlib.nullcontext)
        await self._begun(driver)
        try:
            script = driver.folder.parent / (
                "main.py" if program.language == "python" else "main.sh"
            )
            script.write_bytes(program.code.encode("utf-8", "surrogatepass"))
            argv = [*program.words(self._config.python), str(script)]
            order = {"do": "script", "argv": argv, "code": None, "stdin": plain(program.stdin)}
            return await driver.run(order)
        finally:
            await driver.aclose()

    def _start(self, files: Mapping[str, bytes], limits: Limits, slot: Slot) -> Driver:
        python = self._config.python
        if not os.access(python, os.X_OK):
            raise SandboxError(f"sandbox.python={python} is no program")
        with ExitStack() as opened:
            temporary = tempfile.TemporaryDirectory(prefix="agentrl-")
            opened.callback(_remove, temporary)
            scratch = Path(temporary.name, "scratch")
            scratch.mkdir()
            for name, content in files.items():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                (scratch / name).write_bytes(content)
            folder = str(scratch)
            environment = {**ENVIRONMENT, **dict.fromkeys(("HOME", "PYTHONPATH", "TMPDIR"), folder)}
            process = _Process(
                driver_command(
                    python, limits, folder, str(INSIDE), environment, count_processes=False
                )
            )
            return Driver(process, limits, folder, slot, opened.pop_all())


def _remove(folder: tempfile.TemporaryDirectory[str]) -> None:
    """Remove a program's folder, however deep the folders are that the program made in it."""
    try:
        folder.cleanup()
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", folder.name], check=False)


class _Process:
    """The driver's process: it ends all that it started when its orders end."""

    fault = ""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=ENVIRONMENT,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Its orders have ended: it ends all, then itself. Killed, it could end nobody."""

    async def gone(self) -> bool:
        """Wait until it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while self.process.poll() is None:
                    await asyncio.sleep(0.002)
            return True
        os.killpg(self.process.pid, signal.SIGKILL)
        return False
