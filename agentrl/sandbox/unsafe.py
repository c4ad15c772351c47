"""Run programs as the current user without isolation, for machines that allow nothing else.

Programs get their own folder, environment and limits, and the driver ends all processes that they
start. But they can read all files of this user, use the network and kill this process.
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
from agentrl.sandbox.base import LocalSandbox
from agentrl.sandbox.box import INSIDE, DriverConnection, Slot, driver_command
from agentrl.sandbox.namespace import ENVIRONMENT
from agentrl.sandbox.program import Limits

END_SECONDS = 10.0
WARNING = (
    "sandbox.backend=unsafe-subprocess: code that the model writes runs as you, on this machine,"
    " with its network and all files that you can read or delete"
)


class UnsafeSubprocess(LocalSandbox):
    """The sandbox of `sandbox.backend=unsafe-subprocess`, which does not isolate."""

    name = "unsafe-subprocess"

    def __init__(self, config: SandboxConfig):
        if sys.platform != "linux":
            raise SandboxError(
                f"sandbox.backend=unsafe-subprocess needs Linux, this is {sys.platform}. Set it to"
                " the URL of a SandboxFusion server"
            )
        super().__init__(config)

    def _script_folder(self, driver: DriverConnection) -> Path:
        return driver.folder.parent

    def _start(self, files: Mapping[str, bytes], limits: Limits, slot: Slot) -> DriverConnection:
        python = self._python
        if not os.access(python, os.X_OK):
            raise SandboxError(f"sandbox.python={python} is not an executable file")
        with ExitStack() as resources:
            temporary = tempfile.TemporaryDirectory(prefix="agentrl-")
            resources.callback(_remove, temporary)
            scratch = Path(temporary.name, "scratch")
            scratch.mkdir()
            for name, content in files.items():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                (scratch / name).write_bytes(content)
            folder = str(scratch)
            environment = {**ENVIRONMENT, **dict.fromkeys(("HOME", "PYTHONPATH", "TMPDIR"), folder)}
            process = PlainProcess(
                driver_command(
                    python,
                    limits,
                    folder,
                    str(INSIDE),
                    environment,
                    count_processes=False,
                    remove=temporary.name,
                )
            )
            return DriverConnection(process, limits, folder, slot, resources.pop_all())


def _remove(folder: tempfile.TemporaryDirectory[str]) -> None:
    """Delete a program's folder, even if the program nested folders very deeply."""
    try:
        folder.cleanup()
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", folder.name], check=False)


class PlainProcess:
    """The process of a driver. When it is closed, it kills all programs that it started.

    If this process is killed, the driver's input ends: then it also deletes its folder.
    """

    fault = ""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str] = ENVIRONMENT,
        folder: str | None = None,
    ):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Do nothing: the driver was closed, so it kills all programs and exits.

        After a SIGKILL of the driver, the programs would continue to run.
        """

    async def wait_until_ended(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while self.process.poll() is None:
                    await asyncio.sleep(0.002)
            return True
        os.killpg(self.process.pid, signal.SIGKILL)
        return False
