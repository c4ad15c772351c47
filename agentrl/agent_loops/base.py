"""What an agent loop is, and how one is registered."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl import registry
from agentrl.agent_loops.episode import Episode
from agentrl.errors import RegistryError
from agentrl.signatures import place
from agentrl.trajectory import Message, Sample

Schemas = Sequence[Mapping[str, Any]]
Opening = Callable[[Sample, Schemas], tuple[Sequence[Message], Schemas]]
"""How a loop opens the conversation: the first messages, and the schemas the template shows."""


def plain_opening(sample: Sample, schemas: Schemas) -> tuple[Sequence[Message], Schemas]:
    """The row's prompt as it is, its tools shown by the chat template."""
    return sample.prompt, schemas


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """A registered loop."""

    name: str
    target: Callable[[Episode], Awaitable[None]]
    uses_tools: bool
    uses_interaction: bool
    """A row may carry tools or an interaction only if its loop can use them."""
    opening: Opening


def agent_loop(
    name: str,
    *,
    uses_tools: bool = True,
    uses_interaction: bool = True,
    opening: Opening = plain_opening,
) -> Callable[[Callable[[Episode], Awaitable[None]]], Callable[[Episode], Awaitable[None]]]:
    """Register `async def loop(ep: Episode) -> None` under a name that rows can use.

        @agent_loop("self_check")
        async def self_check(ep):
            await ep.generate()
            ep.observe(Message("user", "Check your work, then give the final answer."))
            await ep.generate()

    The function itself is returned unchanged.

    Args:
        name: what rows say in `agent_name`.
        uses_tools: whether the loop calls `ep.call_tools`.
        uses_interaction: whether the loop calls `ep.interact`.
        opening: how the loop shows its prompt and tools; by default the chat template does.

    Raises:
        RegistryError: the loop is not an async function, or has no name, or one that is taken.
    """
    if not isinstance(name, str):
        raise RegistryError(
            f'write @agent_loop("name") above {place(name)}: rows refer to it by name'
        )

    def register(loop: Callable[[Episode], Awaitable[None]]):
        if not inspect.iscoroutinefunction(loop):
            raise RegistryError(
                f"the agent loop {name!r} ({place(loop)}) must be an `async def` function"
            )
        registry.agent_loops.add(name, AgentLoop(name, loop, uses_tools, uses_interaction, opening))
        return loop

    return register
