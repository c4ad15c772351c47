"""A person at the terminal as the user of a conversation (`agentrl play chat`)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from agentrl.interactions.base import Interaction, Reply
from agentrl.terminal import echo
from agentrl.trajectory import Message


class Person(Interaction):
    """Shows the turns of the policy and the results of its tools, and replies with the next line.

    `/reset` ends the conversation. `/exit` and the end of the input also set `has_left`.
    """

    has_left = False
    _shown = 0
    """The number of messages of the current conversation that were shown or need not be."""
    _is_in_turn = False
    """True if the beginning of a turn was printed and its end was not."""

    def __init__(self) -> None:
        Person._shown = 0

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        self.show(messages)
        Person._shown += 1  # The reply needs no echo.
        line = await asyncio.to_thread(read_line)
        Person.has_left = line is None
        return None if line is None or line == "/reset" else Reply(line)

    @classmethod
    def show(cls, messages: Sequence[Message]) -> None:
        """Print the messages of the current conversation that were not shown yet.

        Messages of the policy are left out: `show_piece` has printed their turns.
        """
        opening = max(i for i, m in enumerate(messages) if m.role == "user") + 1
        for message in messages[cls._shown or opening :]:
            if message.role != "assistant":
                echo(describe(message))
        cls._shown = len(messages)

    @classmethod
    def show_piece(cls, text: str, is_last: bool) -> None:
        """Print the next text of a turn. `echo` escapes each control character of it.

        Args:
            text: the next part of the turn.
            is_last: True if the turn ends here.
        """
        begin = "" if cls._is_in_turn else "  assistant> "
        echo(begin + text.replace("\n", "\n  "), nl=is_last)
        cls._is_in_turn = not is_last


def describe(message: Message) -> str:
    """Return a message as text for the terminal."""
    return f"  {message.role}> " + message.shown.replace("\n", "\n  ")


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
