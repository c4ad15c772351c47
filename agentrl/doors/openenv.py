"""Environments of OpenEnv servers: `environments: {maze: "openenv://HOST:PORT"}` in a config.

A row's `environment_kwargs` are the arguments of `reset`. The type of the server's actions decides
how the model acts:

    its only field is a text       each text of the assistant is an action
    a call of an MCP tool          the server's tools are tools
    a union with a discriminator   each of its types is a tool
    any other                      the tool `step`, whose parameters are the fields
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from agentrl.doors.door import Door
from agentrl.doors.episodes import PackageEnvironment
from agentrl.doors.program import call_once, find_python
from agentrl.errors import ConfigError, Infrastructure, ToolError, UserError
from agentrl.registry import tools
from agentrl.replies import Reply
from agentrl.tools.environment import environment_of_schemas
from agentrl.tools.schema import clean_schema
from agentrl.trajectory import Message, Scores

NAME = "openenv"
Json = dict[str, Any]
SECONDS = 900.0
"""The time limit of the environment. The program, whose errors say more, gives up earlier."""
MCP = "tool_name"
"""The field of an action that names an MCP tool. The arguments are in another field."""
IS_OVER = "The episode is over."


class OpenEnv(PackageEnvironment):
    """One session of a server."""

    _door = NAME
    _url: ClassVar[str]
    _fixed: ClassVar[Mapping[str, Json]]
    """For each tool, the part of its actions that the model does not choose."""
    _text: ClassVar[str]
    """The field of an action that is the assistant's text; "" if the model calls tools."""

    def __init__(self, **arguments: Any):
        self._arguments = arguments
        self._rewards, self._done = [0.0], False

    async def start(self) -> str | None:
        """Return the observation of `reset`."""
        answer = await self._call("start", url=self._url, arguments=self._arguments)
        self._done = answer["done"]
        return answer["text"] or None

    async def call_function(
        self, name: str, arguments: Mapping[str, Any], messages: Sequence[Message]
    ) -> str:
        """Take an action."""
        fixed = self._fixed[name]
        chosen = {"arguments": arguments} if MCP in fixed else arguments
        text = await self._step({**fixed, **chosen})
        return f"{text}\n{IS_OVER}" if self._done else text

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Take the assistant's text as an action."""
        try:
            text = await self._step({self._text: messages[-1].content})
        except ToolError as e:
            text = str(e)
        return Reply(text, done=self._done)

    async def _step(self, action: Mapping[str, Any]) -> str:
        if self._done:
            raise ToolError(IS_OVER)
        answer = await self._call("step", action=action)
        self._rewards.append(answer["reward"])
        self._done = answer["done"]
        if answer["refused"]:
            raise ToolError(answer["text"])
        return answer["text"]

    async def reward(self) -> Scores:
        """Return the sum of the rewards of all actions."""
        metrics = {"last_reward": self._rewards[-1]}
        with suppress(Infrastructure):  # A budget of the run may have interrupted an action.
            state = await self._call("state")
            metrics["step_count"] = float(state.get("step_count", 0))
        return Scores(math.fsum(self._rewards), metrics=metrics)


def load(alias: str, address: str) -> None:
    """Register the environment of a server under its alias.

    Raises:
        UserError: the package is missing, no server answers, or its actions cannot be tools.
    """
    url = _read_url(alias, address)
    where = f"environments.{alias} at {url}"
    find_python(DOOR)
    try:
        server = call_once(NAME, "describe", url=url)
    except UserError as e:
        raise UserError(
            f"environments.{alias}: no OpenEnv server at {url} ({e}). Start it, for example"
            " `uvicorn server:app --port PORT`" + ", or leave out the path" * (url.count("/") > 2)
        ) from None
    if not server["text"] and not server["tools"]:
        raise UserError(f"{where}: the server lists no MCP tools")
    fixed = {name: part for name, _, part in server["tools"]}
    cls = type(alias, (OpenEnv,), {"_url": url, "_text": server["text"], "_fixed": fixed})
    schemas = [_schema(name, schema, part, where) for name, schema, part in server["tools"]]
    hooks = ("start", *(("respond",) if server["text"] else ()), "reward", "close")
    tool = environment_of_schemas(alias, cls, schemas, where, timeout=SECONDS, hooks=hooks)
    tools.add(alias, tool)


def _read_url(alias: str, address: str) -> str:
    """Return the URL in `openenv://HOST:PORT` or `openenv:https://HOST`."""
    match = re.fullmatch(r"openenv:(https?:)?(//[^/?#]+[^?#]*?)/*", address)
    if match is None:
        raise ConfigError(f"environments.{alias}: {address} is not openenv://HOST:PORT")
    return f"{match[1] or 'http:'}{match[2]}"


def _schema(name: str, schema: Json, fixed: Json, where: str) -> Json:
    """Return the function schema of a tool."""
    clean = clean_schema(schema, schema.get("$defs", {}), (), f"{where}: {name}")
    hidden = () if MCP in fixed else ("metadata", *fixed)
    properties = {k: v for k, v in clean.get("properties", {}).items() if k not in hidden}
    required = [k for k in clean.get("required", ()) if k not in hidden]
    description = clean.pop("description", "")
    parameters = {**clean, "type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


DOOR = Door(NAME, "servers of OpenEnv", load, requirements=("openenv>=0.10",))
