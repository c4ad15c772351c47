"""Environments in other programs: `environments: {maze: http://HOST:PORT}` in a config.

The program speaks the HTTP API of a tool server (`agentrl.tools.serving.app`;
examples/environment_server.py has an example). So it may be `agentrl tools serve` in another Python
environment or in a container, or a program without agentrl. Rows contain the alias only: a dataset
does not choose where requests are sent.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl.errors import ConfigError, ToolServerError, UserError
from agentrl.registry import ENVIRONMENT, tools
from agentrl.replies import Reply
from agentrl.tools.environment import Environment, environment_of_schemas
from agentrl.tools.runner import QUEUE_SECONDS
from agentrl.tools.tool import Tool, ToolSpec
from agentrl.tools.toolbox import REQUEST_SECONDS, TOKEN_VARIABLE, HttpToolbox
from agentrl.trajectory import Message, Sample, Scores, ToolCall, ToolResult
from agentrl.workers import PerLoop

_loaded: set[str] = set()


def load(address: str) -> None:
    """Register the environment at an address, `environment+URL#ALIAS`, under its alias.

    Raises:
        UserError: no server answers at the URL, or it does not have the environment. If it has
            only one, the name may be another.
        RegistryError: a tool or another environment has the same name.
    """
    if address in _loaded:
        return
    url, _, alias = address.removeprefix(ENVIRONMENT).rpartition("#")
    try:
        specs = HttpToolbox(url, os.environ.get(TOKEN_VARIABLE, "")).read_tools()
    except (ToolServerError, ConfigError) as e:
        raise UserError(
            f"environments.{alias}: no environment at {url} ({e}). Start its program, for example"
            " `agentrl tools serve FILE --port PORT`. Servers of other projects:"
            " openenv://HOST:PORT, nemo-gym://HOST:PORT"
        ) from None
    offered = [spec for _, spec in specs.items() if spec.environment is not None]
    chosen = [s for s in offered if s.name == alias] or offered
    if len(chosen) != 1:
        raise UserError(
            f"environments.{alias}: the server at {url} has no environment {alias!r}. It has:"
            f" {', '.join(s.name for s in offered) or 'none'}"
        )
    tools.add(alias, _tool(alias, url, chosen[0]))
    _loaded.add(address)


def _tool(alias: str, url: str, spec: ToolSpec) -> Tool:
    """Return the environment as a class tool, whose methods send requests."""
    clients = PerLoop(lambda: HttpToolbox(url, os.environ.get(TOKEN_VARIABLE, "")))
    return environment_of_schemas(
        alias,
        type(alias, (RemoteEnvironment,), {"_clients": clients, "_name": spec.name}),
        spec.schemas,
        f"environments.{alias} at {url}",
        # So long that the toolbox, which also waits for the program's queue, gives up first.
        timeout=2 * (REQUEST_SECONDS + 2 * QUEUE_SECONDS + spec.timeout),
        hooks=("start", *(spec.environment or ()), "close"),
        injected=("messages",) if "messages" in spec.injected else (),
        constructor_injected=("sample",) if spec.wants_row else (),
    )


class RemoteEnvironment(Environment):
    """One episode of an environment in another program."""

    _clients: ClassVar[PerLoop[HttpToolbox]]
    _name: ClassVar[str]

    def __init__(self, sample: Sample | None = None, **arguments: Any):
        """Keep the row's arguments, which `start` sends."""
        kwargs = {self._name: {"create_kwargs": arguments}}
        row = sample or Sample("", ())
        # The program may have another name for the environment than the rows.
        self._sample = replace(
            row, environment=self._name, tools=(self._name,), tools_kwargs=kwargs
        )
        self._episode = uuid.uuid4().hex
        self._calls = self._replies = 0

    @property
    def _toolbox(self) -> HttpToolbox:
        return self._clients.get()

    async def call_function(
        self, name: str, arguments: Mapping[str, Any], messages: Sequence[Message]
    ) -> ToolResult:
        """Call a function of the program."""
        self._calls += 1
        calls = [ToolCall(name, dict(arguments))]
        [result] = await self._toolbox.run(calls, self._episode, self._calls, messages)
        return result

    async def start(self) -> Sequence[Message]:
        """Open the session of the episode."""
        opened = await self._toolbox.open(self._episode, self._sample)
        self.tools = opened.functions
        return opened.messages

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Return the reply of the program."""
        self._replies += 1
        return await self._toolbox.respond(self._episode, self._replies, messages)

    async def reward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, messages: Sequence[Message]
    ) -> Scores:
        """Return the reward that the program reports."""
        return await self._toolbox.score(self._episode, messages)

    async def close(self) -> None:
        """Close the session of the episode."""
        await self._toolbox.close(self._episode)
