"""Episodes of a door's package: environments in its process, and loops that it drives itself."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from agentrl.agent_loops import Episode, agent_loop
from agentrl.agent_loops.control import EpisodeControl
from agentrl.doors.program import program
from agentrl.errors import Infrastructure, UserCodeError
from agentrl.gateway.agent import Agent, play_agent
from agentrl.gateway.requests import MODEL
from agentrl.tools.environment import Environment
from agentrl.trajectory import Scores

TIMEOUT = 300.0
"""How long a method of a fast environment may take, in seconds. The first call of a process waits
until the package is imported."""
SEEDS = 1_000_000
"""The rows of a door's seed have the package's seeds from seed * SEEDS on, one each. So rows of two
seeds are never the same."""

package_loop = partial(
    agent_loop, uses_tools=False, uses_interaction=False, awaited=False, reports_outcome=True
)
"""Register an agent loop that calls `play_in_package`, under the name that rows use."""


class PackageEnvironment(Environment):
    """An environment whose state is in the process of a door's package.

    The functions of the door's program have the parameter `episode`. One is `end`.
    """

    _door: ClassVar[str]

    @cached_property
    def _episode(self) -> str:
        return uuid.uuid4().hex

    async def _call(self, function: str, **arguments: Any) -> Any:
        """Call a function of the program for this episode. See `Program.call` for its errors.

        An error of the package is `Infrastructure`: as the error of a tool, the model would read
        it, and the episode would have a reward.
        """
        try:
            return await program(self._door).call(function, episode=self._episode, **arguments)
        except UserCodeError as e:
            raise Infrastructure(str(e)) from e

    async def close(self) -> None:
        """Free what the process has of the episode."""
        await self._call("end")


class _Package(Agent):
    """A package that drives an episode."""

    def __init__(self, door: str, function: str, task: Mapping[str, Any], url: str, key: str):
        self._door, self._function = door, function
        self._arguments = {**task, "url": url, "key": key, "model": MODEL}
        self._scores = Scores(0.0)  # of an episode that a budget ends

    async def run(self) -> None:
        self._scores = Scores(**await program(self._door).call(self._function, **self._arguments))

    def outcome(self) -> Scores:
        return self._scores


async def play_in_package(
    ep: Episode, door: str, function: str, task: Mapping[str, Any], address: str = "127.0.0.1"
) -> None:
    """Let a package drive an episode, with the policy behind our gateway as its model.

    Args:
        ep: the episode.
        door: the name of the door.
        function: the function of its program that plays. It also gets the `url`, `key` and `model`
            of the API, and returns an `outcome` and `metrics`.
        task: the function's own arguments.
        address: the address of this machine at which the API listens.

    Raises:
        Infrastructure: the engine, or something that the package needs, failed.
        UserCodeError: the package raised an error.
    """
    config = EpisodeControl(ep).attempt.runtime.config.agent
    config = config.model_copy(update={"reward": "post", "on_error": "drop"})
    await play_agent(ep, partial(_Package, door, function, task), config, address)
