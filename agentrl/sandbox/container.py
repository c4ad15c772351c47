"""Run programs in containers of Docker or Podman: each program and each box has its own container.

The driver is process 1 of the container, and its stdin and stdout are those of `podman run -i`. At
the end of its input it exits, and the engine removes the container. So a container ends with the
process that started it, also if that process is killed. The driver's files are arguments of the
command: nothing of this machine is mounted, so the engine may run on another machine.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import NamedTuple

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.base import LocalSandbox
from agentrl.sandbox.box import (
    PROGRAMS,
    PROGRAMS_FOLDER,
    BoxLost,
    DriverConnection,
    Slot,
    driver_command,
)
from agentrl.sandbox.cgroup import EXTRA_MB
from agentrl.sandbox.namespace import ENVIRONMENT, FOLDER, SHM_BYTES
from agentrl.sandbox.program import Limits
from agentrl.sandbox.seccomp import seccomp_filter
from agentrl.sandbox.unsafe import PlainProcess

WARM = 4
"""The maximum number of containers that are started before a program needs them."""
STARTS = 4
"""Containers that start at the same time."""
MAX_PROCESSES = 4096
"""The rlimit of processes for the user of all containers. Each container has its own, lower limit.
It must not exceed the hard limit of the engine."""
_BOOT = f"""
import json, os, sys
for name, text in json.loads(sys.argv[1]).items():
    with open(f"{PROGRAMS_FOLDER}/{{name}}", "w") as file: file.write(text)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Kind(NamedTuple):
    """The properties that a container keeps. Its other limits are set when it is used."""

    image: str
    memory_mb: int
    disk_mb: int
    processes: int


class Container(LocalSandbox):
    """The sandbox of `sandbox.backend=docker` and `sandbox.backend=podman`."""

    def __init__(self, config: SandboxConfig):
        """Create the sandbox.

        Args:
            config: `backend` is the engine's command.

        Raises:
            SandboxError: the engine is not installed, or `images` is empty.
        """
        super().__init__(config)
        self.name = config.backend
        if not config.images:
            raise SandboxError(f"sandbox.backend={self.name} needs images: set sandbox.images")
        if not shutil.which(self.name):
            raise SandboxError(
                f"{self.name} is not installed (no {self.name} on PATH). Install it (Debian,"
                f" Ubuntu: apt-get install {_PACKAGES[self.name]}), or set"
                " sandbox.backend=bubblewrap"
            )
        default = SandboxConfig.model_fields["python"].default
        if config.python == default:
            self._python = "python3"
        self._starts = asyncio.Semaphore(STARTS)
        self._default = self._kind(self._limits, "")
        self._warm: deque[asyncio.Task[DriverConnection]] = deque()
        self._was_used = False

    def check_image(self, image: str) -> None:
        if image and image not in self._config.images:
            raise SandboxError(
                f"the image {image!r} is not in sandbox.images: {', '.join(self._config.images)}."
                " Add it there, or name one of these"
            )

    async def aclose(self) -> None:
        for task in self._warm:
            task.cancel()
        await asyncio.gather(*self._warm, return_exceptions=True)
        self._warm.clear()
        await super().aclose()

    async def _connect(
        self, files: Mapping[str, bytes], limits: Limits, slot: Slot, image: str
    ) -> DriverConnection:
        kind = self._kind(limits, image)
        while True:
            is_warm = kind == self._default and bool(self._warm)
            starting = self._warm.popleft() if is_warm else self._launch(kind)
            if kind == self._default and self._was_used:
                self._refill()
            self._was_used = True
            driver = await starting
            try:
                await driver.use(limits, slot, {**asdict(limits), "processes": 0})
                for path, content in files.items():
                    data = base64.b64encode(content).decode("ascii")
                    await driver.file_request("write", path, data=data)
                return driver
            except BoxLost:
                await driver.aclose()
                if not is_warm:
                    raise
            except BaseException:
                await driver.aclose()
                raise

    def _refill(self) -> None:
        """Start containers for the next programs: the first program of a process waits for its own.

        A test program of `probe`, or a single program, starts no other containers.
        """
        while len(self._warm) < min(self.slots, WARM):
            self._warm.append(asyncio.ensure_future(self._launch(self._default)))

    async def _launch(self, kind: Kind) -> DriverConnection:
        """Start a container, and wait until its driver answers."""
        async with self._starts:
            image, memory, disk, processes = kind
            limits = Limits(memory_mb=memory, disk_mb=disk, processes=processes)
            driver = self._start({}, limits, self._slot, image)
            try:
                return await self._begin(driver)
            except SandboxError as e:
                raise SandboxError(self._explain(driver.output, image)) from e

    def _kind(self, limits: Limits, image: str) -> Kind:
        image = image or self._config.images[0]
        return Kind(image, limits.memory_mb, limits.disk_mb, limits.processes)

    def _start(
        self, files: Mapping[str, bytes], limits: Limits, slot: Slot, image: str = ""
    ) -> DriverConnection:
        name = f"agentrl-{os.getpid()}-{secrets.token_hex(8)}"
        # A container has the PATH of its image.
        environment = {k: v for k, v in ENVIRONMENT.items() if k != "PATH"}
        driver = driver_command(
            self._python, limits, FOLDER, PROGRAMS_FOLDER, environment, count_processes=False
        )
        settings = json.loads(driver.pop())
        settings["filter"] = base64.b64encode(seccomp_filter()).decode("ascii")
        texts = json.dumps({n: content.decode() for n, content in PROGRAMS.items()})
        command = [
            self.name, *_options(self.name, name, limits), "--entrypoint", self._python, image,
            "-I", "-S", "-B", "-c", _BOOT, texts, *driver, json.dumps(settings),
        ]  # fmt: skip
        process = _Client(command, name)
        return DriverConnection(process, limits, FOLDER, slot, ExitStack())

    def _explain(self, output: str, image: str) -> str:
        """Return a message about a container that did not start, with a remedy."""
        output = output.strip() or "it printed nothing"
        fix = next((fix for words, fix in _FIXES if words in output.lower()), "")
        fix = fix.format(engine=self.name, image=image)
        return f"{self.name} cannot start a container of {image}: {output}\n{fix}".rstrip()


def _options(engine: str, name: str, limits: Limits) -> list[str]:
    """Return the subcommand `run` and its options."""
    memory = f"{limits.memory_mb + limits.disk_mb + EXTRA_MB}m"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = MAX_PROCESSES if processes < 0 else min(processes, MAX_PROCESSES)
    # Podman copies the image's files into a tmpfs, unless this is switched off.
    mode = "rw,exec,mode=1777" + (",notmpcopyup" if engine == "podman" else "")
    options = [
        "run", "-i", "--rm", "--pull", "never", "--name", name, "--label",
        f"agentrl.pid={os.getpid()}", "--log-driver", "none", "--no-healthcheck",
        "--network", "none", "--hostname", "sandbox", "--read-only", "--workdir", FOLDER,
        "--tmpfs", f"{FOLDER}:{mode},size={limits.disk_mb}m",
        "--tmpfs", f"/dev/shm:{mode},size={SHM_BYTES}",
        "--tmpfs", f"{PROGRAMS_FOLDER}:{mode},size=16m",
        "--user", "65534:65534", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--memory", memory, "--memory-swap", memory,
        "--pids-limit", str(limits.processes + 1),
        "--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}",
        "--ulimit", "core=0:0",
    ]  # fmt: skip
    if engine == "podman":  # Docker has no such options.
        options += ["--read-only-tmpfs=false", "--image-volume", "ignore", "--http-proxy=false"]
    return options


class _Client(PlainProcess):
    """The engine's client, which runs as long as its container."""

    def __init__(self, command: list[str], name: str):
        # Podman writes a file `oom` in its folder, if the kernel kills a program for its memory.
        super().__init__(command, dict(os.environ), tempfile.gettempdir())
        self._remove = [command[0], "rm", "--force", name]

    async def wait_until_ended(self) -> bool:
        if await super().wait_until_ended():
            return True
        nothing = asyncio.subprocess.DEVNULL
        remove = await asyncio.create_subprocess_exec(
            *self._remove, stdin=nothing, stdout=nothing, stderr=nothing
        )
        return await remove.wait() == 0


_PACKAGES = {"docker": "docker.io", "podman": "podman"}
# Parts of the engines' messages in lower case, and the remedies. The first match counts.
_FIXES = (
    ("no module named", "The Python of {image} lacks standard modules. Choose another image"),
    (
        "permission denied while trying to connect",
        "Add your user to the group docker, or use sandbox.backend=podman, which needs no service",
    ),
    (
        "docker daemon",
        "Start the engine (systemctl start docker), or set DOCKER_HOST to one that runs",
    ),
    (
        "cgroup",
        "The engine's runtime cannot create cgroups here. Podman: try another runtime, in"
        ' /etc/containers/containers.conf: [engine] runtime="runc"',
    ),
    (
        "not found in $path",
        "The image {image} has no python3, which the sandbox needs. Choose another image, or set"
        " sandbox.python to the path of an interpreter in it",
    ),
    (
        "no such file or directory: oci runtime",
        "The image {image} has no interpreter of that path (sandbox.python)",
    ),
    (
        "image",
        "The engine must have the image before the run, which never loads one: {engine} pull"
        " {image}",
    ),
)
