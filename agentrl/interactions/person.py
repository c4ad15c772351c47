"""A person at the terminal as the user of a conversation (`agentrl chat`)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from agentrl.interactions.base import Interaction, Reply
from agentrl.trajectory import Message


class Person(Interaction):
    """Shows the messages of the policy and of its tools, and replies with the next line.

    `/reset` ends the conversation. `/exit` and the end of the input also set `has_left`.
    """

    has_left = False

    def __init__(self) -> None:
        self._shown = 0

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        opening = max(i for i, m in enumerate(messages) if m.role == "user") + 1
        for message in messages[self._shown or opening :]:
            print(describe(message), flush=True)
        self._shown = len(messages) + 1  # The reply needs no echo.
        line = await asyncio.to_thread(read_line)
        Person.has_left = line is None
        return None if line is None or line == "/reset" else Reply(line)


def describe(message: Message) -> str:
    """Return a message as text for the terminal; control characters are escaped."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message.content)
    return f"  {message.role}> " + text.replace("\n", "\n  ")


def read_line() -> str | None:
    """Return the next line that is not empty; None at the end of the input and for `/exit`."""
    while True:
        if sys.stdin.isatty():
            print("you> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return None
        if line.strip():
            return line.strip()
