"""Tasks in Harbor's format: `data.train='harbor:DIR'`, a task's folder or a folder of such folders.

Harbor starts the sandbox, runs the commands, and verifies. `sandbox.backend=harbor:NAME` chooses
where; otherwise Harbor uses Docker. With `?agent=NAME`, an agent of Harbor's plays instead of the
tool loop, with the policy behind our gateway as its model (loop `harbor_agent`).
"""

from __future__ import annotations

import asyncio
import os.path
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

from agentrl.agent_loops import Episode
from agentrl.agent_loops.control import EpisodeControl
from agentrl.config import Config, SandboxConfig
from agentrl.doors.door import Door, Named, read_address
from agentrl.doors.episodes import PackageEnvironment, package_loop, play_in_package
from agentrl.doors.program import call_once
from agentrl.errors import UserError
from agentrl.file_loaders import door_of
from agentrl.http.pool import slot_held
from agentrl.sandbox import current_config
from agentrl.sandbox.program import slot_count
from agentrl.tools.environment import environment
from agentrl.trajectory import Sample, Scores, ToolCall
from agentrl.workers import PerLoop

NAME = "harbor"
AGENT_LOOP = "harbor_agent"
TIMEOUT = 86_400.0
"""How long a method may take, in seconds, also while it waits for a slot. Harbor's own limits are
those of the task."""
LOCAL_BACKENDS = ("docker", "podman")
"""The backends whose sandboxes usually run on this machine."""
MAX_SECONDS = 3600
"""The longest time limit of a command."""

_named = Named("task")  # or the folder of tasks
_semaphores: PerLoop[dict[int, asyncio.Semaphore]] = PerLoop(dict)


def _slot(config: SandboxConfig) -> AbstractAsyncContextManager[Any]:
    """Return a context manager in which a sandbox may run: `sandbox.slots` at once.

    On this machine more would take the cores and the memory from each other. Sandboxes elsewhere
    are limited only if the config says so.
    """
    if not config.slots and _backend(config)[0] not in LOCAL_BACKENDS:
        return nullcontext()
    count = slot_count(config.slots)
    return _semaphores.get().setdefault(count, asyncio.Semaphore(count))


class HarborTask(PackageEnvironment):
    """A task in a sandbox."""

    _door = NAME

    def __init__(self, task: str, multiplier: float = 1.0):
        self._config = current_config()
        self._task = _settings({"task": task, "multiplier": multiplier}, self._config)
        self._slot = AsyncExitStack()

    async def start(self) -> None:
        """Start the sandbox, when a slot is free."""
        await self._slot.enter_async_context(_slot(self._config))
        await self._call("start", **self._task)

    async def close(self) -> None:
        """End the sandbox. The next one takes its slot when it is stopped."""
        async with self._slot:
            await super().close()

    async def bash(self, command: str, timeout_s: int = 120) -> str:
        """Run a bash command.

        Args:
            command: the command. Each one starts in the same folder, without the variables of
                earlier ones.
            timeout_s: its time limit in seconds.
        """
        seconds = min(max(timeout_s, 1), MAX_SECONDS)
        return await self._call("bash", command=command, timeout_s=seconds)

    async def reward(self) -> Scores:
        """Return the verifier's reward."""
        return Scores(**await self._call("reward"))

    @classmethod
    def gold(cls, sample: Sample) -> list[str | ToolCall] | None:
        """Return a call of the task's solution script."""
        solution = sample.extra.get("solution_script")
        return solution and [ToolCall("bash", {"command": solution, "timeout_s": MAX_SECONDS}), ""]


async def harbor_agent(ep: Episode) -> None:
    """Let an agent of Harbor's play the task."""
    config = EpisodeControl(ep).attempt.runtime.config.sandbox
    task = _settings(ep.sample.extra.get(NAME) or {}, config)
    address = task.pop("gateway", "127.0.0.1")
    async with slot_held(_slot(config)):
        await play_in_package(ep, NAME, "agent", task, address)


def _settings(task: Mapping[str, Any], config: SandboxConfig) -> dict[str, Any]:
    """Return what Harbor needs for the task of a row.

    Raises:
        UserCodeError: the config does not name the folder of the task with these settings.
    """
    path = Path(os.path.normpath(task.get("task") or ""))  # DIR/.. is not a task of DIR
    settings = {k: v for k, v in task.items() if k != "task"}
    _named.require(str(path), str(path.parent), settings=settings)
    backend, options = _backend(config)
    return {**settings, "task": str(path), "backend": backend, "options": options}


def _backend(config: SandboxConfig) -> tuple[str, dict[str, Any]]:
    """Return Harbor's name of a backend, and its options."""
    if door_of(config.backend) == NAME:
        return read_address(config.backend, {})
    return config.backend if config.backend == "podman" else "docker", {}


def _read(address: str) -> tuple[str, dict[str, Any]]:
    """Return the folder of an address, and the settings of its tasks."""
    defaults = {"agent": "", "agent_timeout_multiplier": 1.0, "gateway": "127.0.0.1"}
    folder, options = read_address(address, defaults, only=True)
    file, colon, name = options["agent"].rpartition(":")
    if file.endswith(".py"):
        options["agent"] = f"{Path(file).expanduser().resolve()}{colon}{name}"
    settings = {"multiplier": options.pop("agent_timeout_multiplier")}
    settings |= options if options["agent"] else {}
    return str(Path(folder).expanduser().resolve()), settings


def rows(address: str) -> list[Mapping[str, Any]]:
    """Return the rows of `harbor:DIR?agent=NAME&gateway=ADDRESS&agent_timeout_multiplier=1.0`."""
    folder, settings = _read(address)
    made = call_once(NAME, "rows", folder=folder, agent=settings.get("agent", ""))
    return [
        {
            "prompt": prompt,
            "data_source": f"{NAME}/{Path(folder).name}",
            **_player({"task": task, **settings}),
            "solution_script": solution,
        }
        for task, prompt, solution in made
    ]


def _player(task: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with the environment, or with the agent, that plays a task."""
    if "agent" in task:
        return {"agent_name": AGENT_LOOP, "extra_info": {NAME: task}}
    return {"environment": NAME, "environment_kwargs": task}


def load(alias: str, address: str) -> None:
    """Register the environment and the loop, and allow rows to name the tasks of this folder."""
    environment(alias, timeout=TIMEOUT)(HarborTask)
    package_loop(AGENT_LOOP)(harbor_agent)
    _named.add(*_read(address))


def check(config: Config) -> None:
    """Raise `UserError` if Harbor cannot use the backend here."""
    backend, options = _backend(config.sandbox)
    folders = [_read(name)[0] for name in config.data.files if door_of(name) == NAME]
    try:
        call_once(NAME, "check", backend=backend, options=options, folders=folders)
    except UserError as e:
        key = f"sandbox.backend={config.sandbox.backend}"
        default = "" if backend != "docker" else " (rows of Harbor use docker then)"
        raise UserError(f"{key}{default}: {e}") from None


DOOR = Door(
    NAME,
    "tasks in sandboxes (Terminal-Bench, SWE tasks), and Harbor's agents",
    load,
    rows,
    check,
    requirements=("harbor>=0.25", "podman-compose>=1.2"),
    python=(3, 12),
)
