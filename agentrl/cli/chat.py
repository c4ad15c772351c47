"""`agentrl chat`: talk with a policy in the terminal, and let it use its tools."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from agentrl.cli.options import ConfigFile, Files, Model, Overrides, describe_sampling
from agentrl.interactions import Interaction, Reply
from agentrl.trajectory import Message

UNLIMITED = {
    "timeout_s": 1e6, "max_turns": 10**6, "max_tool_calls": 10**6, "max_trajectory_tokens": 10**7,
}  # fmt: skip
"""A person ends the conversation, not a budget."""


def chat(
    overrides: Overrides = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    agent: Annotated[str, typer.Option(help="The agent loop.")] = "tool_agent",
    system: Annotated[str, typer.Option(help="The system message.")] = "",
) -> None:
    """Talk with a policy: you are the user, and it calls the tools of --file.

    `/reset` begins a new conversation, `/exit` or the end of the input ends it.

    Examples:
        agentrl chat --model tiny --file shelf:calculator

        agentrl chat -c runs/a/config.yaml --model runs/a
    """
    from transformers.utils import logging

    from agentrl import registry
    from agentrl.agent_loops.attempt import load_template
    from agentrl.agent_loops.play import play
    from agentrl.cli.options import read_config, with_model_folder
    from agentrl.engine.open import open_engine
    from agentrl.errors import UserError
    from agentrl.trajectory import Sample

    settings = read_config(config, overrides, model=model, file=file, needs_rows=False)
    rollout = settings.rollout.model_copy(update=UNLIMITED)
    settings = with_model_folder(settings.model_copy(update={"rollout": rollout}))
    loop = registry.agent_loops.get(agent)
    if not loop.uses_interaction:
        raise UserError(f"the loop {agent!r} ends after the policy's message: use tool_agent")
    logging.disable_progress_bar()
    template = load_template(settings)
    engine = open_engine(settings, template.tokenizer)
    names = tuple(registry.tools.user_names()) or tuple(registry.tools.names())
    sampled = describe_sampling(settings.rollout.temperature)
    typer.echo(f"tools: {', '.join(names) or 'none'}; {sampled}. /reset, /exit")
    registry.interactions.add("you", You)
    You.has_left = False
    opening = (Message("system", system),) if system else ()
    try:
        while (line := read_line()) is not None:
            if line == "/reset":
                continue
            sample = Sample(
                "chat",
                (*opening, Message("user", line)),
                agent_name=agent,
                tools=names,
                interaction="you",
            )
            play(sample, engine, template.tokenizer, config=settings)
            if You.has_left:
                return
    finally:
        engine.close()


class You(Interaction):
    """The person at the terminal."""

    has_left = False

    def __init__(self) -> None:
        self._shown = 0

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Show what happened since the last reply, and return the next line."""
        first = max(i for i, m in enumerate(messages) if m.role == "user") if not self._shown else 0
        for message in messages[max(self._shown, first + 1) :]:
            typer.echo(describe(message))
        self._shown = len(messages) + 1
        line = await asyncio.to_thread(read_line)
        You.has_left = line is None
        return None if line in (None, "/reset") else Reply(line or "")


def describe(message: Message) -> str:
    """Return a message as text for the terminal, without its control characters."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message.content)
    return f"  {message.role}> " + text.replace("\n", "\n  ")


def read_line() -> str | None:
    """Return the next line that is not empty; None at the end of the input or after `/exit`."""
    while True:
        if sys.stdin.isatty():
            typer.echo("you> ", nl=False)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return None
        if line.strip():
            return line.strip()
