"""`@agent_loop`, and the agent loops that come with agentrl."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl import registry
from agentrl.agent_loops.episode import Episode
from agentrl.chat import REACT_STOP, parse_react
from agentrl.errors import RegistryError, UserError
from agentrl.signatures import identify, require_name
from agentrl.trajectory import Message, Sample

Schemas = Sequence[Mapping[str, Any]]
Opening = Callable[[Sample, Schemas], tuple[Sequence[Message], Schemas]]
"""Returns the first messages of the conversation, and the tool schemas that the template shows."""


def plain_opening(sample: Sample, schemas: Schemas) -> tuple[Sequence[Message], Schemas]:
    """Return the row's prompt and the tool schemas unchanged."""
    return sample.prompt, schemas


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """A registered agent loop."""

    name: str
    target: Callable[[Episode], Awaitable[None]]
    uses_tools: bool
    """Whether a row with this loop may name tools."""
    uses_interaction: bool
    """Whether a row with this loop may name an interaction."""
    opening: Opening
    awaited: bool = True
    """Whether a local engine waits for its turns, so that a run can be repeated bit for bit. The
    turns of other loops come from an agent in another process."""
    reports_outcome: bool = False
    """Whether the loop gives the outcome, so that no grader does."""


def agent_loop(
    name: str,
    *,
    uses_tools: bool = True,
    uses_interaction: bool = True,
    opening: Opening = plain_opening,
    awaited: bool = True,
    reports_outcome: bool = False,
) -> Callable[[Callable[[Episode], Awaitable[None]]], Callable[[Episode], Awaitable[None]]]:
    """Register `async def loop(ep: Episode) -> None` under a name that rows can use.

        @agent_loop("self_check")
        async def self_check(ep):
            await ep.generate()
            ep.observe(Message("user", "Check your work, then give the final answer."))
            await ep.generate()

    The decorator returns the function unchanged.

    Args:
        name: the name that rows have in `agent_name`.
        uses_tools: whether the loop calls `ep.call_tools`.
        uses_interaction: whether the loop calls `ep.interact`.
        opening: makes the first messages. By default these are the row's prompt, and the chat
            template shows the tools.
        awaited: False if the turns come from another process. The local engine does not wait for
            them then, so that a slow process delays no other episode; a run of such a loop cannot
            be repeated bit for bit.
        reports_outcome: whether the loop gives the outcome, so that no grader does.

    Raises:
        RegistryError: the loop is not an async function, or the name is missing or taken.
    """
    require_name("agent_loop", name)

    def register(loop: Callable[[Episode], Awaitable[None]]):
        if not inspect.iscoroutinefunction(loop):
            raise RegistryError(
                f"the agent loop {name!r} ({identify(loop)}) must be an `async def` function"
            )
        entry = AgentLoop(
            name, loop, uses_tools, uses_interaction, opening, awaited, reports_outcome
        )
        registry.agent_loops.add(name, entry)
        return loop

    return register


@agent_loop("single_turn", uses_tools=False, uses_interaction=False)
async def single_turn(ep: Episode) -> None:
    """Generate once."""
    await ep.generate()


@agent_loop("tool_agent")
async def tool_agent(ep: Episode) -> None:
    """Generate; then run the tool calls, or else ask the interaction for a reply, or else end."""
    while True:
        turn = await ep.generate()
        if turn.tool_calls:
            await ep.call_tools()
        elif not await ep.interact():
            return


# ReAct (Yao et al., 2022, arXiv 2210.03629): thought, action and observation as plain text.
#
# The model writes `Action:` and `Action Input:` and is stopped at `Observation:`, which it sampled
# itself (mask 1). The next message is a user message with the tool's result (mask 0). So the model
# is never trained on an observation that it made up.

_FORMAT = """\
Use this format:
Thought: what to do next
Action: the name of a tool
Action Input: its arguments as a JSON object
Observation: the result of the tool
... (repeat as needed)
Final Answer: the final answer
Tools:
"""
_NO_ACTION = "Error: no action found. Write 'Action:' and 'Action Input:', or 'Final Answer:'."


def react_opening(sample: Sample, schemas: Schemas) -> tuple[Sequence[Message], Schemas]:
    """Return the row's prompt with the ReAct format and the tools in its system message.

    Without tools the prompt is unchanged.
    """
    if not schemas:
        return sample.prompt, ()
    text, prompt = _FORMAT + "\n".join(map(_signature, schemas)), list(sample.prompt)
    if prompt and prompt[0].role == "system":
        prompt[0] = replace(prompt[0], content=f"{prompt[0].content}\n{text}")
    else:
        prompt.insert(0, Message("system", text))
    return prompt, ()


def _signature(schema: Mapping[str, Any]) -> str:
    """Describe a tool in one line: `calculator(expression: string): Evaluate an expression.`."""
    function = schema["function"]
    arguments = ", ".join(
        f"{name}: {spec.get('type', 'any') if isinstance(spec, Mapping) else 'any'}"
        for name, spec in function["parameters"].get("properties", {}).items()
    )
    return f"{function['name']}({arguments}): {function.get('description', '')}"


@agent_loop("react", opening=react_opening)
async def react(ep: Episode) -> None:
    """Run actions until the final answer; then ask the interaction for a reply, if there is one."""
    while True:
        turn = await ep.generate(stop=(REACT_STOP,), parse=parse_react)
        if turn.tool_calls:
            await ep.call_tools(answer_as=_observation)
        elif turn.content.endswith(REACT_STOP):
            ep.observe(_observation(_NO_ACTION))
        elif not await ep.interact():
            return


def _observation(content: str) -> Message:
    return Message("user", f"{REACT_STOP} {content}")


@agent_loop("recorded", uses_tools=False, uses_interaction=False, reports_outcome=True)
async def recorded(ep: Episode) -> None:
    """Refuse to play a row of `recorded:DIR`: it is an episode that was served."""
    raise UserError("recorded answers are not played. To train on them: agentrl train --from DIR")
