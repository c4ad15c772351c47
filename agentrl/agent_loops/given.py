"""What a loop hands to an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.errors import UserCodeError
from agentrl.trajectory import Message


def checked(verb: str, messages: Any) -> list[Message]:
    """The messages that a verb was given.

    Raises:
        UserCodeError: they are none.
    """
    given = list(messages) if isinstance(messages, Sequence) else [messages]
    for message in given if not isinstance(messages, str) else [messages]:
        if not isinstance(message, Message):
            raise UserCodeError(
                f'ep.{verb} takes messages: Message("user", {message!r:.60}), not {message!r:.60}'
            )
    if not isinstance(messages, Sequence):
        raise UserCodeError(f"ep.{verb} takes a list of messages: [{messages!r:.60}]")
    return given
